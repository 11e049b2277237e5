// Curves of the metrics, and the time of a step.

const COLOURS = 7; // --c0 ... of page.css; further lines are dashed
const figures = new Map(); // id: {figure, draw, plot, stale, seen}
const GLANCE = ["reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "perf/tokens_per_s"];
const off = new Set(); // families that are switched off
const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const figure = figures.get(entry.target.dataset.id);
  if (!figure) return;
  figure.seen = entry.isIntersecting;
  if (figure.seen && figure.stale) redraw(figure);
}), {rootMargin: "200px"});
const resized = new ResizeObserver((entries) => entries.forEach(({target}) => {
  const plot = figures.get(target.dataset.id)?.plot, {clientWidth: width, clientHeight: height} = target;
  if (plot && width && plot.width !== width) plot.setSize({width, height});
}));

/** Runs that are drawn as one curve: those with the same flags but the seed. */
function families() {
  const byKey = new Map();
  for (const run of runs) {
    const key = $("apart").checked ? run.name : run.family;
    byKey.set(key, [...(byKey.get(key) ?? []), run]);
  }
  return [...byKey].map(([key, members], i) => {
    const [{name}] = members, setting = name.replace(/,?seed=\d+/, ""), seeds = plural(members.length, "seed");
    const label = members.length === 1 ? name : [setting, seeds].filter(Boolean).join(", ");
    return {key, members, label, colour: `c${i % COLOURS}`, dash: i >= COLOURS ? [6, 4] : []};
  });
}
function colourOf(run) { return families().find((family) => family.members.includes(run)).colour; }

/** step => where it stands on the x axis. */
function xOf(run) {
  const mode = $("x-axis").value, metric = {tokens: "training/tokens", time: "timing_s/step"}[mode];
  if (!metric || !run.metrics[metric]) return (step) => step;
  const [axis, values] = run.metrics[metric], ends = [];
  values.reduce((sum, value, i) => (ends[i] = sum + (value ?? 0)), 0);
  const steps = run.axes[axis];
  const at = new Map(steps.map((step, i) => [step, ends[i]]));
  return (step) => at.get(step) ?? ends[steps.findLastIndex((before) => before < step)] ?? 0;
}

/** {x, y, low, high} of a metric: the mean of the family's runs and their range, or one run's confidence interval. */
function table(family, name) {
  const points = new Map();
  for (const run of family.members) {
    if (!run.metrics[name]) continue;
    const [axis, values] = run.metrics[name], x = xOf(run);
    const [low, high] = ["low", "high"].map((end) => run.metrics[`${name}/ci_${end}`]?.[1]);
    run.axes[axis].forEach((step, i) => {
      const point = points.get(step) ?? points.set(step, {x: [], y: [], low: null, high: null}).get(step);
      point.x.push(x(step));
      if (values[i] !== null) point.y.push(values[i]);
      if (low?.length === values.length) Object.assign(point, {low: low[i], high: high[i]});
    });
  }
  const all = [...points].sort(([a], [b]) => a - b).map(([, point]) => point);
  const several = family.members.length > 1;
  return {
    x: all.map((point) => mean(point.x)),
    y: all.map((point) => (point.y.length ? mean(point.y) : null)),
    low: all.map((point) => (several ? (point.y.length ? Math.min(...point.y) : null) : point.low)),
    high: all.map((point) => (several ? (point.y.length ? Math.max(...point.y) : null) : point.high)),
  };
}

/** The mean over a centred window, which does not lag behind a trend; gaps stay gaps. */
function smooth(values) {
  const half = Math.round((Number($("smooth").value) / 200) * values.length);
  if (!half) return values;
  return values.map((value, i) => {
    const near = value === null ? [] : values.slice(Math.max(0, i - half), i + half + 1).filter((y) => y !== null);
    return near.length ? mean(near) : null;
  });
}

function axes(formatX, formatY) {
  const grid = {stroke: () => colour("line"), width: 1};
  const axis = {stroke: () => colour("muted"), grid, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  return [{...axis, grid: {show: false}, size: 20, gap: 3, values: (_, all) => all.map(formatX)},
    {...axis, size: 50, gap: 4, values: (_, all) => all.map(formatY)}];
}
function options(place, more) {
  const sync = {key: "x", setSeries: false, scales: ["x", null]}; // the cursors of all charts move together
  const cursor = {sync, y: false, points: {size: 6}, drag: {x: true, y: false}};
  const size = {width: place.clientWidth, height: place.clientHeight, padding: [8, 8, 0, 0]};
  return {...size, legend: {show: false}, scales: {x: {time: false}}, cursor, ...more};
}
const formatX = () => ($("x-axis").value === "time" ? fmtTime : fmtAxis);

function drawMetric(name, place, read) {
  const tables = [], series = [{}], bands = [], lines = [];
  for (const family of families().filter((one) => !off.has(one.key))) {
    const {x, y, low, high} = table(family, name);
    if (!x.length) continue;
    const smoothed = smooth(y), columns = [x], stroke = () => colour(family.colour);
    const add = (values, more) => {
      columns.push(values);
      return series.push({points: {show: false}, ...more}) - 1;
    };
    if (high.some((value) => value !== null)) {
      const [top, bottom] = [high, low].map((end) => add(smooth(end), {width: 0}));
      bands.push({series: [top, bottom], fill: () => colour(family.colour, .18)});
    }
    if (smoothed !== y) add(y, {stroke: () => colour(family.colour, .3), width: 1});
    const points = {show: x.length < 40, size: 5, fill: stroke, width: 0};
    lines.push({family, at: add(smoothed, {stroke, width: 2, dash: family.dash, points})});
    tables.push(columns);
  }
  if (!tables.length) { read.textContent = "no values"; return null; }
  const data = uPlot.join(tables), last = data[0].length - 1;
  const show = (plot) => {
    const at = plot.cursor.idx ?? last, said = [], several = lines.length > 1;
    const place = `${$("x-axis").value} ${formatX()(data[0][at])} · `;
    read.replaceChildren(Number.isInteger(plot.cursor.idx) ? place : "last ");
    for (const {family, at: line} of lines) {
      let near = at; // of another run's x axis there may be no value here
      while (near > 0 && data[line][near] === undefined) near--;
      const value = fmt(data[line][near]);
      read.append(several ? dot(family.colour, family.label) : "", `${value} `);
      said.push(several ? `${family.label}: ${value}` : value);
    }
    read.dataset.say = `${read.firstChild.textContent} ${said.join(", ")}`;
    paintDots();
  };
  const wrong = runs.flatMap((run) => Object.entries(run.nonfinite[name] ?? {}));
  const counts = wrong.map(([value, times]) => `${value} × ${times}`);
  place.parentElement.querySelector(".nan").textContent = counts.join(", ");
  const values = data[lines[0].at].filter((value) => typeof value === "number");
  const [from, to, least, most] = [values[0], values.at(-1), Math.min(...values), Math.max(...values)].map(fmt);
  const told = `${name}: from ${from} to ${to}, least ${least}, most ${most}; arrow keys move along`;
  place.setAttribute("aria-label", told);
  const hooks = {setCursor: [show], ready: [show]};
  return new uPlot(options(place, {series, bands, hooks, axes: axes(formatX(), fmtAxis)}), data, place);
}

function makeFigure(id, title, draw) {
  const told = {role: "img", "aria-label": title, tabindex: 0, onkeydown: alongChart};
  const place = h("div", {class: "plot", "data-id": id, ...told}), read = h("span", {class: "read"});
  const caption = h("figcaption", {}, h("b", {}, title), h("span", {class: "nan"}), read);
  const element = h("figure", {class: "card"}, caption, place);
  figures.get(id)?.plot?.destroy();
  figures.set(id, {draw: () => draw(place, read), place, plot: null, stale: true, seen: false});
  watch.observe(place);
  resized.observe(place);
  return element;
}
function redraw(figure) {
  figure.plot?.destroy();
  figure.plot = figure.draw();
  figure.stale = false;
}
/** Those in sight now, the others when they are scrolled to. prefix: of their ids. */
function redrawAll(prefix = "") {
  for (const [id, figure] of figures) {
    if (!id.startsWith(prefix)) continue;
    figure.stale = true;
    if (figure.seen) redraw(figure);
  }
}
function alongChart(event) {
  const plot = figures.get(event.currentTarget.dataset.id)?.plot, move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!plot || !move) return;
  event.preventDefault();
  const last = plot.data[0].length - 1, from = plot.cursor.idx ?? (move < 0 ? last + 1 : last);
  const at = Math.max(0, Math.min(last, from + move));
  plot.setCursor({left: plot.valToPos(plot.data[0][at], "x"), top: 10}, true, true); // of the other charts too
  const read = event.currentTarget.parentElement.querySelector(".read");
  $("say").textContent = read.dataset.say ?? read.textContent;
}

let groupsShown = "";
/** The groups of curves. They are only built anew if there are other metrics, so that a refresh moves nothing. */
function drawCurves() {
  $("apart-label").hidden = new Set(runs.map((run) => run.family)).size === runs.length;
  $("legend").replaceChildren(...(runs.length < 2 ? [] : families().map((family) => {
    const toggle = () => { if (!off.delete(family.key)) off.add(family.key); drawCurves(); };
    return h("button", {type: "button", "aria-pressed": String(!off.has(family.key)), onclick: toggle},
      dot(family.colour), h("bdi", {}, family.label));
  })));
  paintDots();
  redrawAll("a:");
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort()
    .filter((name) => !/\/ci_(low|high)$/.test(name) && words.every((word) => name.toLowerCase().includes(word)));
  if (groupsShown === JSON.stringify([names, words])) { redrawAll("m:"); return; }
  groupsShown = JSON.stringify([names, words]);
  for (const [id, figure] of figures) {
    if (!id.startsWith("m:")) continue;
    figure.plot?.destroy();
    watch.unobserve(figure.place);
    figures.delete(id);
  }
  const open = new Set([...document.querySelectorAll(".group[open]")].map((group) => group.dataset.name));
  const groups = new Map();
  const validated = names.filter((name) => runs.some((run) => run.metrics[`${name}/ci_low`])).slice(0, 3);
  const glance = [...validated, ...GLANCE.filter((name) => names.includes(name))];
  if (!words.length && glance.length) groups.set("at a glance", glance);
  for (const name of names) {
    const prefix = name.split("/")[0];
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  $("groups").replaceChildren(...[...groups].map(([prefix, members]) => h("details",
    {class: "group", "data-name": prefix, open: words.length > 0 || prefix === "at a glance" || open.has(prefix)},
    h("summary", {}, prefix, h("span", {class: "muted"}, ` ${members.length}`)),
    h("div", {class: "grid"}, ...members.map((name) =>
      makeFigure(`m:${prefix}:${name}`, name, (place, read) => drawMetric(name, place, read)))))));
  const none = words.length ? "No metric has this name." : "No metrics yet: the first step is not done.";
  if (!groups.size) $("groups").replaceChildren(h("p", {class: "muted"}, none));
}

// ---- where a step's time goes ----------------------------------------------------------------------------

/** {steps, stages: [[name, seconds of each step]]}, longest first; "other" is what of timing_s/step no stage has. */
function stagesOf(run) {
  const [axis, whole] = run.metrics["timing_s/step"], steps = run.axes[axis];
  const names = Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step");
  const stages = names.map((name) => {
    const [axis, seconds] = run.metrics[name], at = new Map(run.axes[axis].map((step, i) => [step, seconds[i]]));
    return [name.slice("timing_s/".length), steps.map((step) => at.get(step) ?? 0)];
  }).sort(([, a], [, b]) => mean(b) - mean(a));
  const known = steps.map((_, i) => stages.reduce((sum, [, seconds]) => sum + seconds[i], 0));
  stages.push(["other", steps.map((_, i) => Math.max(0, (whole[i] ?? 0) - known[i]))]);
  return {steps, stages};
}

/** [the colour of a stage, which is the same in all runs, its strength]; "other" has one of its own. */
function stageColour(stage) {
  if (stage === "other") return ["other", 1];
  const names = runs.flatMap((run) => Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/")));
  const usual = ["update", "rollout", "log_probs", "reward", "weight_sync", "advantages"];
  const all = [...new Set([...usual, ...names.map((name) => name.slice("timing_s/".length)).sort()])];
  const number = all.indexOf(stage);
  return [`c${number % COLOURS}`, number < COLOURS ? 1 : .5];
}

function drawTimes() {
  const timed = runs.filter((run) => run.metrics["timing_s/step"]);
  if (!timed.length) { $("times").replaceChildren(h("p", {class: "muted"}, "No step is done yet.")); return; }
  const names = JSON.stringify(timed.map((run) => run.name));
  if ($("times").dataset.names !== names) {
    $("times").dataset.names = names;
    const folded = timed.length > MANY, grid = h("div", {class: "grid"}, ...timed.map((run) => {
      const title = timed.length > 1 ? run.name : "seconds of each step, by stage";
      const figure = makeFigure(`t:${run.name}`, title, (place, read) => drawTime(run.name, place, read));
      figure.classList.add("tall");
      figure.append(h("ul", {class: "stages"}));
      return figure;
    }));
    $("times").replaceChildren(folded ? more(`times of ${timed.length} runs`, grid) : grid);
    if (timed.length === 1) grid.classList.remove("grid");
  } else redrawAll("t:");
}

function longestStep() {
  const timed = runs.filter((run) => run.metrics["timing_s/step"]).map(stagesOf);
  const tops = timed.flatMap(({steps, stages}) => steps.map((_, i) =>
    stages.reduce((sum, [, seconds]) => sum + seconds[i], 0)));
  return tops.reduce((most, top) => Math.max(most, top), 0) || 1;
}

function drawTime(name, place, read) {
  const {steps, stages} = stagesOf(runs.find((run) => run.name === name)), tops = [];
  stages.forEach(([, seconds], i) => tops.push(seconds.map((s, k) => s + (i ? tops[i - 1][k] : 0))));
  const colours = stages.map(([stage]) => stageColour(stage));
  const tint = (i, alpha) => () => colour(colours[i][0], alpha * colours[i][1]);
  const line = (i) => ({stroke: tint(i, 1), width: 1, points: {show: false}, ...(i ? {} : {fill: tint(0, .5)})});
  const series = [{}, ...stages.map((_, i) => line(i))];
  const bands = stages.slice(1).map((_, i) => ({series: [i + 2, i + 1], fill: tint(i + 1, .5)}));
  const total = mean(tops.at(-1)) || 1;
  const share = (seconds) => `${fmt3(mean(seconds))} s, ${Math.round((100 * mean(seconds)) / total)} %`;
  place.parentElement.querySelector(".stages").replaceChildren(...stages.map(([stage, seconds], i) =>
    h("li", {}, dot(colours[i][0]), `${stage} ${share(seconds)}`)));
  paintDots();
  const show = (plot) => {
    const at = plot.cursor.idx;
    const parts = () => stages.slice(0, 3).map(([stage, seconds]) => `${stage} ${fmt3(seconds[at])}`).join(", ");
    read.textContent = !Number.isInteger(at) ? `${fmt3(total)} s a step`
      : `step ${steps[at]}: ${fmt3(tops.at(-1)[at])} s, ${parts()}`;
  };
  const told = stages.map(([stage, seconds]) => `${stage} ${share(seconds)}`).join(", ");
  place.setAttribute("aria-label", `seconds of a step: ${told}; arrow keys move along`);
  const cursor = {y: false, points: {show: false}, drag: {x: true, y: false}};
  const scales = {x: {time: false}, y: {range: [0, longestStep() * 1.05]}}; // the same for all runs
  const hooks = {setCursor: [show], ready: [show]};
  const drawn = options(place, {series, bands, cursor, scales, hooks, axes: axes(fmtAxis, (s) => `${fmt(s)} s`)});
  return new uPlot(drawn, [steps, ...tops], place);
}
