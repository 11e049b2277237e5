// The page of runs. What comes from a run is only ever inserted as text (`h`, `put`), never as HTML.
"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const LIVE = $("data") === null; // served by --serve: data and chunks are fetched, and fetched again
const COLOURS = 7; // --c0 ... of page.css; further lines are dashed
const PAGE = 12; // groups of samples that are shown at once
let runs = LIVE ? [] : JSON.parse($("data").textContent).runs;

// ---- elements, text, numbers -----------------------------------------------------------------------

/** An element. props: attributes, "on..." listeners; children: elements or text, which may be anything. */
function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) {
    if (typeof child === "string") put(element, child);
    else if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

const ODD = /[\p{C}\u2028\u2029]/u; // control, format (right-to-left marks, zero width), private and unassigned characters

/** Appends text as it is, but what would not show, or would turn text around, as a visible name. */
function put(element, text) {
  if (!ODD.test(text)) { element.append(text); return; }
  for (const part of text.split(/([\p{C}\u2028\u2029])/u)) {
    if (!ODD.test(part) || part === "\t") element.append(part);
    else if (part === "\n") element.append(h("span", {class: "eol"}, "↵"), "\n");
    else {
      const code = part.codePointAt(0), name = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
      const shown = code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "␡" : `‹${name}›`;
      element.append(h("span", {class: "odd", title: name}, shown));
    }
  }
}

function fmt(x) {
  if (x === null || x === undefined) return "–";
  if (!Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  if (x !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(2).replace("e+", "e");
  return size >= 1e4 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(4)));
}

/** Of what is only known to two or three digits. */
function fmt3(x) {
  if (!Number.isFinite(x)) return String(x);
  return x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
}

function fmtAxis(x) {
  const size = Math.abs(x);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return Number((x / unit).toPrecision(4)) + letter;
  return fmt(x);
}

function fmtTime(s) {
  if (s < 120) return fmt(s) + " s";
  return s < 7200 ? `${Math.floor(s / 60)}:${String(Math.round(s % 60)).padStart(2, "0")} min` : `${(s / 3600).toFixed(1)} h`;
}

const probe = h("span", {hidden: true});
document.body.append(probe);
/** The present value of a colour of page.css, for a canvas. */
function colour(name, alpha = 1) {
  probe.style.color = `color-mix(in srgb, var(--${name}) ${alpha * 100}%, transparent)`;
  return getComputedStyle(probe).color;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
function later(ms, action) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(action, ms); };
}
function facts(pairs) {
  return h("dl", {}, ...Object.entries(pairs).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}
function more(summary, content) { return h("details", {}, h("summary", {}, summary), content); }

// ---- what the runs are -----------------------------------------------------------------------------

function drawRuns() {
  const all = (selector) => [...document.querySelectorAll(`#runs ${selector}`)];
  const open = all("details").map((details) => details.open), focus = all("summary").indexOf(document.activeElement);
  $("run-cards").replaceChildren(...runs.map(runCard));
  const alarms = runs.flatMap((run) => run.troubles.map((trouble) => alarm(run, trouble)));
  $("alarms").replaceChildren(...(alarms.length ? [h("h2", {class: "hidden"}, "Alarms"), ...alarms]
    : [h("p", {class: "calm"}, "✓ No alarms.")]));
  all("details").forEach((details, i) => { details.open = open[i] ?? false; });
  all("summary")[focus]?.focus({preventScroll: true});
}

function runCard(run) {
  const of = run.total_steps ? ` of ${run.total_steps}` : "";
  const flags = Object.entries(run.flags ?? {}).map(([name, [value, usual]]) =>
    h("li", {}, `--${name.replaceAll("_", "-")} ${value}`, h("span", {class: "muted"}, ` not ${usual || "empty"}`)));
  const all = Object.fromEntries(Object.entries(run.all_flags).map(([name, value]) => [`--${name.replaceAll("_", "-")}`, value]));
  return h("article", {class: "card run", "aria-label": `run ${run.name}`},
    h("header", {}, runs.length > 1 ? h("span", {class: "dot", "data-c": colourOf(run)}) : null,
      h("h2", {}, h("bdi", {}, runs.length > 1 ? run.name : run.script ?? "unknown script")),
      h("span", {class: `pill ${run.state.split(" ")[0]}`}, run.state)),
    h("progress", {max: run.total_steps || 1, value: run.step, "aria-label": "steps done"}),
    h("div", {class: "muted"}, (runs.length > 1 ? `${run.script ?? "unknown script"}, ` : "") + `step ${run.step}${of}` + (run.seed === null ? "" : `, seed ${run.seed}`)),
    run.flags === null ? h("p", {class: "muted"}, "Which flags differ from the defaults was not recorded.")
      : flags.length ? h("ul", {class: "flags", "aria-label": "flags that are not at their default"}, ...flags)
      : h("p", {class: "muted"}, "All flags have their default."),
    facts(run.facts), ...run.notes.map((note) => h("p", {class: "note"}, note)),
    Object.keys(all).length ? more(`all ${plural(Object.keys(all).length, "flag")}`, facts(all)) : null,
    Object.keys(run.packages).length ? more(plural(Object.keys(run.packages).length, "package"), facts(run.packages)) : null);
}

function alarm(run, trouble) {
  const help = $(`help-${trouble.section}`);
  const first = trouble.steps.slice(0, 12).join(", ") + (trouble.steps.length > 12 ? ", …" : "");
  return h("div", {class: "card alarm", role: "group", "aria-label": "alarm"},
    h("strong", {}, "▲ ", trouble.text), runs.length > 1 ? h("bdi", {}, ` · ${run.name}`) : null,
    h("div", {class: "muted"}, trouble.steps.length ? `step ${first} ` : "",
      trouble.steps.length ? h("button", {type: "button", class: "link", onclick: () => showStep(run, trouble.steps[0])}, "samples") : null),
    help ? more("what it means and what to do", h("div", {class: "help"}, help.content.cloneNode(true))) : null);
}

// ---- curves ----------------------------------------------------------------------------------------

const figures = new Map(); // id: {figure, draw, plot, stale, seen}
const off = new Set(); // families that are switched off
const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const figure = figures.get(entry.target.dataset.id);
  if (!figure) return;
  figure.seen = entry.isIntersecting;
  if (figure.seen && figure.stale) redraw(figure);
}), {rootMargin: "200px"});
const resized = new ResizeObserver((entries) => entries.forEach(({target}) => {
  const plot = figures.get(target.dataset.id)?.plot;
  if (plot && target.clientWidth && plot.width !== target.clientWidth) plot.setSize({width: target.clientWidth, height: target.clientHeight});
}));

/** Runs that are drawn as one curve: those with the same flags but the seed. */
function families() {
  const byKey = new Map();
  for (const run of runs) {
    const key = $("apart").checked ? run.name : run.family;
    byKey.set(key, [...(byKey.get(key) ?? []), run]);
  }
  return [...byKey].map(([key, members], i) => ({key, members, colour: `c${i % COLOURS}`, dash: i >= COLOURS ? [6, 4] : [],
    label: members.length === 1 ? members[0].name : `${members[0].name} and ${plural(members.length - 1, "seed")} more`}));
}
function colourOf(run) { return families().find((family) => family.members.includes(run)).colour; }
function paintDots() { for (const dot of document.querySelectorAll("[data-c]")) dot.style.background = `var(--${dot.dataset.c})`; }

/** step => where it stands on the x axis. */
function xOf(run) {
  const mode = $("x-axis").value, metric = {tokens: "training/tokens", time: "timing_s/step"}[mode];
  if (!metric || !run.metrics[metric]) return (step) => step;
  const [axis, values] = run.metrics[metric], ends = [];
  values.reduce((sum, value, i) => (ends[i] = sum + (value ?? 0)), 0);
  const steps = run.axes[axis];
  return (step) => {
    let low = 0, high = steps.length;
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle + 1; else high = middle; }
    return low ? ends[low - 1] : 0;
  };
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
  const axis = {stroke: () => colour("muted"), grid: {stroke: () => colour("line"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  return [{...axis, grid: {show: false}, size: 20, gap: 3, values: (_, all) => all.map(formatX)},
    {...axis, size: 50, gap: 4, values: (_, all) => all.map(formatY)}];
}
function options(place, more) {
  return {width: place.clientWidth, height: place.clientHeight, legend: {show: false}, padding: [8, 8, 0, 0], scales: {x: {time: false}},
    cursor: {sync: {key: "x", setSeries: false, scales: ["x", null]}, y: false, points: {size: 6}, drag: {x: true, y: false}}, ...more};
}
const formatX = () => ($("x-axis").value === "time" ? fmtTime : fmtAxis);

function drawMetric(name, place, read) {
  const tables = [], series = [{}], bands = [], lines = [];
  for (const family of families().filter((one) => !off.has(one.key))) {
    const {x, y, low, high} = table(family, name);
    if (!x.length) continue;
    const smoothed = smooth(y), columns = [x], stroke = () => colour(family.colour);
    const add = (values, more) => { columns.push(values); series.push({spanGaps: false, points: {show: false}, ...more}); return series.length - 1; };
    if (high.some((value) => value !== null)) {
      const [top, bottom] = [high, low].map((end) => add(smooth(end), {width: 0}));
      bands.push({series: [top, bottom], fill: () => colour(family.colour, .18)});
    }
    if (smoothed !== y) add(y, {stroke: () => colour(family.colour, .3), width: 1});
    const few = x.length < 40;
    lines.push({family, at: add(smoothed, {stroke, width: 2, dash: family.dash, points: {show: few, size: few ? 5 : 4, fill: stroke, width: 0}})});
    tables.push(columns);
  }
  if (!tables.length) { read.textContent = "no values"; return null; }
  const data = uPlot.join(tables), last = data[0].length - 1;
  const show = (plot) => {
    const at = plot.cursor.idx ?? last, said = [];
    read.replaceChildren(plot.cursor.idx === null || plot.cursor.idx === undefined ? "last " : `${$("x-axis").value} ${formatX()(data[0][at])} · `);
    for (const {family, at: line} of lines) {
      let near = at; // of another run's x axis there may be no value here
      while (near > 0 && data[line][near] === undefined) near--;
      read.append(lines.length > 1 ? h("span", {class: "dot", "data-c": family.colour, title: family.label}) : "", `${fmt(data[line][near])} `);
      said.push(lines.length > 1 ? `${family.label}: ${fmt(data[line][near])}` : fmt(data[line][near]));
    }
    read.dataset.say = `${read.firstChild.textContent} ${said.join(", ")}`;
    paintDots();
  };
  const wrong = runs.flatMap((run) => Object.entries(run.nonfinite[name] ?? {}).map(([value, times]) => `${value} × ${times}`));
  place.parentElement.querySelector(".nan").textContent = wrong.join(", ");
  const values = data[lines[0].at].filter((value) => typeof value === "number");
  place.setAttribute("aria-label", `${name}: from ${fmt(values[0])} to ${fmt(values.at(-1))}, least ${fmt(Math.min(...values))}, most ${fmt(Math.max(...values))}; arrow keys move along`);
  return new uPlot(options(place, {series, bands, axes: axes(formatX(), fmtAxis), hooks: {setCursor: [show], ready: [show]}}), data, place);
}

function makeFigure(id, title, draw) {
  const place = h("div", {class: "plot", "data-id": id, tabindex: 0, role: "img", "aria-label": title, onkeydown: alongChart});
  const read = h("span", {class: "read"});
  const element = h("figure", {class: "card"}, h("figcaption", {}, h("b", {}, title), h("span", {class: "nan"}), read), place);
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
function redrawAll() {
  for (const figure of figures.values()) { figure.stale = true; if (figure.seen) redraw(figure); }
}
function alongChart(event) {
  const plot = figures.get(event.currentTarget.dataset.id)?.plot, move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!plot || !move) return;
  event.preventDefault();
  const last = plot.data[0].length - 1, at = Math.max(0, Math.min(last, (plot.cursor.idx ?? last + (move < 0 ? 1 : 0)) + move));
  plot.setCursor({left: plot.valToPos(plot.data[0][at], "x"), top: 10}, true, true); // of the other charts too
  const read = event.currentTarget.parentElement.querySelector(".read");
  $("say").textContent = read.dataset.say ?? read.textContent;
}

let groupsShown = "";
/** The groups of curves. They are only built anew if there are other metrics, so that a refresh moves nothing. */
function drawCurves() {
  $("apart-label").hidden = new Set(runs.map((run) => run.family)).size === runs.length;
  const all = families();
  $("legend").replaceChildren(...(runs.length < 2 ? [] : all.map((family) => h("button", {type: "button", "aria-pressed": String(!off.has(family.key)),
    onclick: () => { if (!off.delete(family.key)) off.add(family.key); drawCurves(); }}, h("span", {class: "dot", "data-c": family.colour}), h("bdi", {}, family.label)))));
  paintDots();
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort()
    .filter((name) => !/\/ci_(low|high)$/.test(name) && words.every((word) => name.toLowerCase().includes(word)));
  if (groupsShown === JSON.stringify([names, words])) { redrawAll(); return; }
  groupsShown = JSON.stringify([names, words]);
  for (const [id, figure] of figures) if (id.startsWith("m:")) { figure.plot?.destroy(); figures.delete(id); watch.unobserve(figure.place); }
  const open = new Set([...document.querySelectorAll(".group[open]")].map((group) => group.dataset.name));
  const groups = new Map();
  const validated = names.filter((name) => runs.some((run) => run.metrics[`${name}/ci_low`])).slice(0, 3);
  const glance = ["reward/mean", "response_length/mean", "actor/entropy", "actor/grad_norm", "perf/tokens_per_s"].filter((name) => names.includes(name));
  if (!words.length && names.length) groups.set("at a glance", [...validated, ...glance]);
  for (const name of names) {
    const prefix = name.split("/")[0];
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  $("groups").replaceChildren(...[...groups].map(([prefix, members]) => h("details",
    {class: "group", "data-name": prefix, open: words.length > 0 || prefix === "at a glance" || open.has(prefix)},
    h("summary", {}, prefix, h("span", {class: "muted"}, ` ${members.length}`)),
    h("div", {class: "grid"}, ...members.map((name) => makeFigure(`m:${prefix}:${name}`, name, (place, read) => drawMetric(name, place, read)))))));
  if (!groups.size) $("groups").replaceChildren(h("p", {class: "muted"}, words.length ? "No metric has this name." : "No metrics yet: the first step is not done."));
}

// ---- where a step's time goes ----------------------------------------------------------------------

/** {steps, stages: [[name, seconds of each step]]}, longest first; "other" is what of timing_s/step no stage has. */
function stagesOf(run) {
  const [axis, whole] = run.metrics["timing_s/step"], steps = run.axes[axis];
  const stages = Object.keys(run.metrics).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step").map((name) => {
    const at = new Map(run.axes[run.metrics[name][0]].map((step, i) => [step, run.metrics[name][1][i]]));
    return [name.slice("timing_s/".length), steps.map((step) => at.get(step) ?? 0)];
  }).sort(([, a], [, b]) => mean(b) - mean(a));
  stages.push(["other", steps.map((_, i) => Math.max(0, (whole[i] ?? 0) - stages.reduce((sum, [, seconds]) => sum + seconds[i], 0)))]);
  return {steps, stages};
}

function drawTimes() {
  const timed = runs.filter((run) => run.metrics["timing_s/step"]);
  if (!timed.length) { $("times").replaceChildren(h("p", {class: "muted"}, "No step is done yet.")); return; }
  const names = JSON.stringify(timed.map((run) => run.name));
  if ($("times").dataset.names !== names) {
    $("times").dataset.names = names;
    $("times").replaceChildren(h("div", {class: "grid"}, ...timed.map((run) => {
      const figure = makeFigure(`t:${run.name}`, timed.length > 1 ? run.name : "seconds of each step, by stage", (place, read) => drawTime(run.name, place, read));
      figure.classList.add("tall");
      figure.append(h("ul", {class: "stages"}));
      return figure;
    })));
    if (timed.length === 1) $("times").firstChild.classList.remove("grid");
  } else for (const [id, figure] of figures) if (id.startsWith("t:")) { figure.stale = true; if (figure.seen) redraw(figure); }
}

function drawTime(name, place, read) {
  const {steps, stages} = stagesOf(runs.find((run) => run.name === name)), tops = [];
  stages.forEach(([, seconds], i) => tops.push(seconds.map((s, k) => s + (i ? tops[i - 1][k] : 0))));
  const tint = (i, alpha) => () => colour(`c${i % COLOURS}`, i < COLOURS ? alpha : alpha / 2);
  const series = [{}, ...stages.map((_, i) => ({stroke: tint(i, 1), width: 1, points: {show: false}, ...(i ? {} : {fill: tint(0, .5)})}))];
  const bands = stages.slice(1).map((_, i) => ({series: [i + 2, i + 1], fill: tint(i + 1, .5)}));
  const total = mean(tops.at(-1)) || 1;
  place.parentElement.querySelector(".stages").replaceChildren(...stages.map(([stage, seconds], i) => h("li", {},
    h("span", {class: "dot", "data-c": `c${i % COLOURS}`}), `${stage} ${fmt3(mean(seconds))} s, ${Math.round((100 * mean(seconds)) / total)} %`)));
  paintDots();
  const show = (plot) => {
    const at = plot.cursor.idx;
    read.textContent = at === null || at === undefined ? `${fmt3(total)} s a step`
      : `step ${steps[at]}: ${fmt3(tops.at(-1)[at])} s, ` + stages.slice(0, 3).map(([stage, seconds]) => `${stage} ${fmt3(seconds[at])}`).join(", ");
  };
  place.setAttribute("aria-label", `seconds of a step: ${stages.map(([stage, seconds]) => `${stage} ${fmt3(mean(seconds))}`).join(", ")}`);
  const cursor = {y: false, points: {show: false}, drag: {x: true, y: false}};
  return new uPlot(options(place, {series, bands, cursor, axes: axes(fmtAxis, (s) => fmt(s) + " s"),
    scales: {x: {time: false}, y: {range: (_, __, most) => [0, most * 1.05]}}, hooks: {setCursor: [show], ready: [show]}}), [steps, ...tops], place);
}

// ---- samples: chunks and rows ----------------------------------------------------------------------

const chunks = new Map(); // key: promise of its rows; the latest 40
function chunk(key) {
  const found = chunks.get(key) ?? unpack(key);
  chunks.delete(key);
  chunks.set(key, found);
  if (chunks.size > 40) chunks.delete(chunks.keys().next().value);
  return found;
}
async function unpack(key) {
  const packed = LIVE ? (await fetch(`/chunk/${key}`)).body
    : new Blob([Uint8Array.from(atob($(`chunk-${key}`).textContent), (c) => c.charCodeAt(0))]).stream();
  const buffer = await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const size = new DataView(buffer).getUint32(0, true);
  const {prompts, rows} = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const planes = new Uint8Array(buffer, 4 + size), half = planes.length / 2;
  let start = 0;
  for (const row of rows) {
    row.prompt = prompts[row.prompt];
    row.response ??= row.tokens.join("");
    row.numbers = {};
    for (const field of row.fields) {
      const bits = new Uint32Array(row.length);
      for (let i = 0; i < row.length; i++) bits[i] = ((planes[start + i] << 24) | (planes[half + start + i] << 16)) >>> 0;
      row.numbers[field] = new Float32Array(bits.buffer);
      start += row.length;
    }
  }
  return rows;
}

let rows = []; // of all runs: what the index knows of a response
function readIndex() {
  rows = runs.flatMap((run) => {
    const {texts, step, ...columns} = run.samples, coded = ["kind", "chunk", "group", "source", "finish", "prompt"];
    return step.map((_, i) => {
      const row = {run, step: step[i]};
      for (const name of ["at", "sample", "score", "length"]) row[name] = columns[name][i];
      for (const name of coded) row[name] = texts[columns[name][i]];
      row.card = JSON.stringify([run.name, row.kind, row.step, row.group]);
      return row;
    });
  });
  const fill = (id, values, all) => {
    const kept = $(id).value;
    $(id).replaceChildren(h("option", {value: ""}, all), ...values.map((value) => h("option", {value}, value)));
    $(id).value = values.includes(kept) ? kept : "";
    $(id).closest("label").hidden = values.length < 2;
  };
  const values = (name) => [...new Set(rows.map((row) => row[name]))].filter((value) => value !== null).sort();
  fill("f-run", runs.map((run) => run.name), "all");
  fill("f-source", values("source"), "all");
  fill("f-finish", values("finish"), "any");
  const kept = $("colour").value;
  const there = COLOURINGS.filter(([field]) => field === "none" || runs.some((run) => field in run.samples.scales));
  $("colour").replaceChildren(...there.map(([field, name]) => h("option", {value: field}, name)));
  $("colour").value = there.some(([field]) => field === kept) ? kept : (there[1] ?? there[0])[0];
  document.querySelector(".paint").hidden = there.length < 2;
}

// ---- samples: which are shown ----------------------------------------------------------------------

let onlyPrompt = null, pages = 1, asked = 0;
const number = (id, otherwise) => ($(id).value === "" ? otherwise : Number($(id).value));

/** The rows that match the form. Text is looked for in all chunks, which takes a moment. */
async function matching(mine) {
  const between = (name, value) => value >= number(`f-${name}-min`, -Infinity) && value <= number(`f-${name}-max`, Infinity);
  const scored = $("f-score-min").value !== "" || $("f-score-max").value !== "";
  const is = (id, value) => $(id).value === "" || $(id).value === value;
  const found = rows.filter((row) => is("f-run", row.run.name) && is("f-kind", row.kind) && is("f-source", row.source) && is("f-finish", row.finish)
    && between("step", row.step) && between("length", row.length) && (!scored || (row.score !== null && between("score", row.score)))
    && (onlyPrompt === null || row.prompt === onlyPrompt));
  const text = $("f-text").value.toLowerCase();
  if (!text) return found;
  const unread = new Map(); // chunk: its rows
  for (const row of found) if (row.text === undefined) unread.set(row.chunk, [...(unread.get(row.chunk) ?? []), row]);
  const keys = [...unread.keys()];
  for (let i = 0; i < keys.length; i += 8) { // unpacking has threads of its own
    if (asked !== mine) return null; // the form has changed meanwhile
    $("count").textContent = `looking through the texts, ${i} of ${keys.length} …`;
    await Promise.all(keys.slice(i, i + 8).map(async (key) => {
      const texts = await chunk(key);
      for (const row of unread.get(key)) row.text = `${texts[row.at].prompt}\n${texts[row.at].response}`.toLowerCase();
    }));
  }
  return found.filter((row) => row.text.includes(text));
}

const scoreOf = (group) => mean(group.map((row) => row.score ?? 0));
const spread = (group) => Math.max(...group.map((row) => row.score ?? 0)) - Math.min(...group.map((row) => row.score ?? 0));
const ORDERS = {
  new: (a, b) => b[0].step - a[0].step, old: (a, b) => a[0].step - b[0].step, low: (a, b) => scoreOf(a) - scoreOf(b), high: (a, b) => scoreOf(b) - scoreOf(a),
  spread: (a, b) => spread(b) - spread(a), long: (a, b) => Math.max(...b.map((row) => row.length)) - Math.max(...a.map((row) => row.length)),
};

let cards = new Map(); // what is shown: {key: element}, kept over a refresh so that nothing moves
/** fresh: the runs' files have changed. Then what is being read stays until the reader asks for what is new. */
async function drawSamples(fresh = false) {
  const mine = ++asked, found = await matching(mine);
  if (asked !== mine || found === null) return;
  const groups = new Map();
  for (const row of found) groups.set(row.card, [...(groups.get(row.card) ?? []), row]);
  const sorted = [...groups.values()].sort(ORDERS[$("f-sort").value]), shown = sorted.slice(0, pages * PAGE);
  const kept = runs.reduce((sum, run) => sum + run.samples.kept, 0);
  const untrained = runs.every((run) => !run.samples.has_training) ? " No training samples were kept: --save-rollouts keeps them." : "";
  $("count").textContent = !kept ? "No samples yet: none were kept (--save-rollouts), and none were validated."
    : `${plural(found.length, "response")} in ${plural(sorted.length, "group")}` + (found.length < rows.length ? `, of ${plural(rows.length, "response")}` : "")
    + "." + (rows.length < kept ? ` The page holds ${rows.length.toLocaleString("en")} of ${kept.toLocaleString("en")} that the runs kept (--max-mb).` : "") + untrained;
  $("one-prompt").hidden = onlyPrompt === null;
  const before = cards, keyOf = (group) => group[0].card + group.map((row) => row.at);
  const reading = fresh && before.size && $("cards").getBoundingClientRect().top < innerHeight;
  $("new").hidden = !(reading && shown.some((group) => !before.has(keyOf(group))));
  if (reading) return;
  cards = new Map(shown.map((group) => [keyOf(group), before.get(keyOf(group)) ?? groupCard(group)]));
  const wanted = [...cards.values()];
  for (const element of [...$("cards").children]) if (!wanted.includes(element)) element.remove();
  wanted.forEach((element, i) => { if ($("cards").children[i] !== element) $("cards").insertBefore(element, $("cards").children[i] ?? null); });
  $("more").hidden = shown.length === sorted.length;
}

const filling = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (!entry.isIntersecting) return;
  filling.unobserve(entry.target);
  entry.target.fill();
}), {rootMargin: "400px"});

function groupCard(group) {
  const {run, step, kind, source, prompt, chunk: key, group: name} = group[0];
  const size = rows.filter((row) => row.card === group[0].card).length;
  const scores = group.filter((row) => row.score !== null).map((row) => row.score);
  const again = new Set(rows.filter((row) => row.prompt === prompt).map((row) => row.card)).size;
  const body = h("div", {}, h("p", {class: "muted"}, "…"));
  const element = h("article", {class: `card sample-group${size > 1 ? " many" : ""}`, "aria-label": `samples of step ${step}`},
    h("header", {}, runs.length > 1 ? h("b", {}, h("bdi", {}, run.name)) : null, h("b", {}, `step ${step}`),
      h("span", {}, kind === "train" ? "training" : "validation"), source ? h("bdi", {class: "muted"}, source) : null,
      size > 1 ? h("span", {class: "muted"}, `${group.length === size ? size : `${group.length} of ${size}`} responses` + (scores.length ? `, mean score ${fmt(mean(scores))}` : "")) : null,
      again > 1 && onlyPrompt === null ? h("button", {type: "button", class: "link", onclick: () => showPrompt(prompt)}, `this prompt in ${again} places`) : null), body);
  element.fill = async () => {
    const texts = await chunk(key);
    const first = texts[group[0].at];
    body.replaceChildren(h("div", {class: "prompt", tabindex: 0, role: "group", "aria-label": "prompt"}, h("div", {class: "text"}, first.prompt)),
      first.ground_truth === null || first.ground_truth === undefined ? "" : h("p", {class: "muted truth"}, "truth ", first.ground_truth),
      h("div", {class: "responses"}, ...group.map((row) => response(row, texts[row.at]))));
  };
  filling.observe(element);
  return element;
}

function showPrompt(prompt) {
  onlyPrompt = prompt;
  $("f-sort").value = prompt === null ? "new" : "old";
  $("one-prompt").replaceChildren("Only one prompt, over all steps. ", h("button", {type: "button", class: "link", onclick: () => showPrompt(null)}, "show all prompts"));
  drawSamples();
  $("count").scrollIntoView({block: "center"});
}
function showStep(run, step) {
  $("sample-bar").reset();
  if (runs.length > 1) $("f-run").value = run.name;
  $("f-step-min").value = $("f-step-max").value = step;
  onlyPrompt = null;
  drawSamples();
  $("samples").scrollIntoView();
}

// ---- samples: one response and its tokens ----------------------------------------------------------

// field, its name, whether both signs mean something, the least and the largest value at which the colour may be full
const COLOURINGS = [["none", "nothing"], ["logp", "log-prob", false, 1, 3], ["log_ratio", "ratio new / old", true, .05], ["advantage", "advantage", true, .1],
  ["mismatch", "mismatch with the engine", true, .01], ["entropy", "entropy", false, .5], ["ref", "log-prob minus the reference's", true, .1], ["value", "value", true, .1]];
const CALL = /<tool_call>[^]*?(?:<\/tool_call>|$)|\[TOOL_CALLS\][^]*|<function=[^]*?(?:<\/function>|$)|<\|python_tag\|>[^]*/g;

function fullScale(field) {
  const [, , , least, most = Infinity] = COLOURINGS.find(([name]) => name === field);
  return Math.min(most, Math.max(least, ...runs.map((run) => run.samples.scales[field] ?? 0)));
}
function shade(field, x, full) {
  if (Number.isNaN(x)) return "odd";
  const level = Math.min(8, Math.round((Math.abs(x) / full) * 8));
  return level ? (x > 0 ? "p" : "n") + level : "";
}

function response(row, sample) {
  const {numbers} = sample, mask = expand(sample.response_mask), advantages = numbers.advantage?.filter((_, i) => !mask || mask[i]);
  const box = h("div", {class: "tokens text", tabindex: 0, role: "group", dir: "auto",
    "aria-label": `response of ${row.length} ${sample.tokens ? "tokens; arrow keys go through them" : "characters"}`});
  box.sample = {...sample, mask, loss: expand(sample.loss_mask), versions: expand(sample.weight_versions), spans: []};
  let start = 0;
  const parts = sample.turns ?? [{by: null, text: sample.response, tokens: sample.tokens?.length}];
  for (const turn of parts) {
    const place = turn.by ? h("div", {class: `turn ${turn.by}`}) : box;
    const calls = turn.by === "policy" ? [...turn.text.matchAll(CALL)].map((call) => [call.index, call.index + call[0].length]) : [];
    if (turn.by) place.append(h("small", {}, (turn.by === "policy" ? "policy" + (calls.length ? " calls a tool" : "") : "environment")
      + (turn.reward ? `, reward ${fmt(turn.reward)}` : "")));
    let at = 0;
    for (const token of sample.tokens ? sample.tokens.slice(start, start + turn.tokens) : [turn.text]) {
      const span = h("span", {class: "t"}, token);
      if (calls.some(([from, to]) => at >= from && at < to)) span.classList.add("call");
      if (sample.tokens) { span.at = box.sample.spans.length; box.sample.spans.push(span); }
      at += token.length;
      place.append(span);
    }
    start += turn.tokens ?? 0;
    if (turn.by) box.append(place);
  }
  paint(box);
  const rewards = sample.rewards ?? {};
  return h("section", {class: "response", "aria-label": `response ${row.sample + 1}`},
    h("header", {}, h("b", {}, `score ${fmt(row.score)}`), advantages?.length ? h("b", {}, `advantage ${fmt3(mean([...advantages]))}`) : null,
      h("span", {}, plural(row.length, sample.tokens ? "token" : "character")), row.finish ? h("bdi", {}, row.finish) : null), box,
    Object.keys(rewards).length ? more("rewards", facts(Object.fromEntries(Object.entries(rewards).map(([name, value]) => [name, typeof value === "number" ? fmt(value) : JSON.stringify(value)])))) : null);
}
function expand(parts) { return parts && parts.flatMap(([value, times]) => Array(times).fill(value)); }

function paint(box) {
  const field = $("colour").value, {numbers, spans, mask} = box.sample, values = numbers?.[field], full = field !== "none" && fullScale(field);
  spans.forEach((span, i) => {
    const given = mask && !mask[i];
    span.className = ["t", given ? "off" : "", span.classList.contains("call") ? "call" : "", values && !given ? shade(field, values[i], full) : ""].filter(Boolean).join(" ");
  });
}
function drawScale() {
  const field = $("colour").value;
  if (field === "none") { $("scale").replaceChildren(); return; }
  const [, , both] = COLOURINGS.find(([name]) => name === field), full = fullScale(field);
  const ends = {log_ratio: [Math.exp(-full), Math.exp(full)], logp: [-full, 0], entropy: [0, full]}[field] ?? [-full, full];
  const levels = [...(both || field === "logp" ? [8, 7, 6, 5, 4, 3, 2, 1].map((i) => `n${i}`) : []), "zero", ...(both || field === "entropy" ? [1, 2, 3, 4, 5, 6, 7, 8].map((i) => `p${i}`) : [])];
  $("scale").replaceChildren(fmt(ends[0]), h("span", {class: "steps"}, ...levels.map((level) => h("i", {class: level}))), fmt(ends[1]));
}

function showTip(span, spoken) {
  const box = span.closest(".tokens"), {numbers: n, mask, loss, versions} = box.sample, i = span.at;
  const logp = n.logp?.[i], ratio = n.log_ratio?.[i], old = logp - (ratio || 0), mismatch = n.mismatch?.[i];
  const lines = {};
  if (mask && !mask[i]) lines["not sampled"] = "given by the environment";
  else if (loss && !loss[i]) lines["not trained"] = "outside the loss";
  if (!mask || mask[i]) Object.assign(lines, {
    "log-prob": n.logp && `${fmt3(logp)} (${Number((100 * Math.exp(logp)).toPrecision(2))} %)`, "before the update": n.logp && n.log_ratio && fmt3(old),
    "engine's": n.logp && n.mismatch && fmt3(old - mismatch), ratio: n.log_ratio && fmt3(Math.exp(ratio)), advantage: n.advantage && fmt3(n.advantage[i]),
    mismatch: n.mismatch && fmt3(mismatch), entropy: n.entropy && fmt3(n.entropy[i]), "reference's": n.ref && fmt3(logp - n.ref[i]), value: n.value && fmt3(n.value[i]),
    "weights of step": versions && String(versions[i])});
  const known = Object.fromEntries(Object.entries(lines).filter(([, value]) => value !== undefined && value !== null));
  $("tip").replaceChildren(h("div", {class: "text"}, span.textContent), h("div", {class: "muted"}, `token ${i + 1} of ${box.sample.spans.length}, numbers within 1.6 %`), facts(known));
  $("tip").hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect(), size = $("tip").getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  $("tip").style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 4))}px`;
  $("tip").style.top = `${Math.max(4, below ? at.bottom + 8 : at.top - size.height - 8)}px`;
  if (spoken) $("say").textContent = $("tip").innerText;
}
function hideTip() { $("tip").hidden = true; for (const span of document.querySelectorAll(".t.cur")) span.classList.remove("cur"); }

$("cards").addEventListener("mouseover", (event) => { const span = event.target.closest(".t"); if (span?.at !== undefined) showTip(span); else hideTip(); });
$("cards").addEventListener("mouseleave", hideTip);
$("cards").addEventListener("focusout", hideTip);
$("cards").addEventListener("keydown", (event) => {
  const spans = event.target.sample?.spans, move = {ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity}[event.key];
  if (event.key === "Escape") hideTip();
  if (!spans?.length || !move) return;
  event.preventDefault();
  const now = spans.findIndex((span) => span.classList.contains("cur")), next = Math.max(0, Math.min(spans.length - 1, (now < 0 && move > 0 ? -1 : now) + move));
  hideTip();
  spans[next].classList.add("cur");
  spans[next].scrollIntoView({block: "nearest"});
  showTip(spans[next], true);
});

// ---- start, theme, refresh -------------------------------------------------------------------------

function drawAll(fresh) {
  readIndex();
  drawRuns();
  drawCurves();
  drawTimes();
  drawScale();
  drawSamples(fresh);
}

const THEMES = {"": ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"]};
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  $("theme").textContent = THEMES[theme][0];
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme][1]}`);
  redrawAll();
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), now = document.documentElement.dataset.theme ?? "";
  setTheme(names[(names.indexOf(now) + 1) % names.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
$("find").addEventListener("input", later(150, drawCurves));
for (const id of ["x-axis", "apart"]) $(id).addEventListener("change", () => { off.clear(); drawRuns(); drawCurves(); });
$("smooth").addEventListener("input", () => { document.querySelector("output[for=smooth]").value = Number($("smooth").value) ? `${$("smooth").value} %` : "off"; redrawAll(); });
$("open-all").addEventListener("click", () => {
  const all = [...document.querySelectorAll(".group")], open = all.some((group) => !group.open);
  for (const group of all) group.open = open;
  $("open-all").textContent = open ? "Close all" : "Open all";
});
const filter = later(150, () => { pages = 1; drawSamples(); });
$("sample-bar").addEventListener("input", filter);
$("sample-bar").addEventListener("reset", () => { onlyPrompt = null; filter(); });
$("colour").addEventListener("change", () => { for (const box of document.querySelectorAll(".tokens")) paint(box); drawScale(); });
$("new").addEventListener("click", () => { drawSamples(); $("samples").scrollIntoView(); });
$("more").addEventListener("click", () => { pages += 1; drawSamples(); });

let stamp = null;
async function refresh() {
  try {
    const answer = await fetch("/data.json", {headers: stamp ? {"If-None-Match": stamp} : {}});
    if (answer.status === 200) {
      stamp = answer.headers.get("ETag");
      runs = (await answer.json()).runs;
      drawAll(true);
    }
    $("live").textContent = answer.ok || answer.status === 304 ? `live, ${new Date().toLocaleTimeString()}` : "the run cannot be read any more";
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch fails with a TypeError
    $("live").textContent = "the server has ended; the page stays";
  }
  setTimeout(refresh, 2000);
}
if (LIVE) refresh(); else drawAll();
})();
