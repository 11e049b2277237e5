// The first screen: samples of the last validation, results as a table, the first curve.

const MANY = 6; // runs, whose cards and times are folded
const NO_FLAGS = new Set(["run_name", "output_dir", "seed"]); // in which all runs of a sweep differ

/** The first and the last value of a metric; before: of the start model, if it was validated. */
function ends(run, name) {
  const [axis, values] = run.metrics[name] ?? [0, []], steps = run.axes[axis] ?? [];
  const last = values.findLastIndex((value) => value !== null);
  const interval = ["low", "high"].map((end) => run.metrics[`${name}/ci_${end}`]?.[1][last]);
  return {before: steps[0] === 0 ? values[0] : null, after: values[last] ?? null, step: steps[last], interval};
}

/** What is shown of all runs: validated metrics or, without any, the reward of the samples. */
function resultNames() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const validated = names.filter((name) => runs.some((run) => run.metrics[`${name}/ci_low`]));
  return (validated.length ? validated : names.filter((name) => name === "reward/mean")).slice(0, 4);
}

function rowOf(cells, tag = "td") { return h("tr", {}, ...cells.map((cell) => h(tag, {}, cell))); }
function tableOf(label, head, body) {
  const table = h("table", {}, h("thead", {}, head), h("tbody", {}, ...body));
  return h("div", {class: "card results", role: "group", tabindex: 0, "aria-label": label}, table);
}

/** One run: each metric before training and now. */
function beforeAndAfter(run) {
  return tableOf("before and after", rowOf(["", "before training", "now", "at step"], "th"), resultNames().map((name) => {
    const {before, after, step, interval: [low, high]} = ends(run, name);
    const spread = typeof low === "number" ? ` (${fmt3(low)} to ${fmt3(high)})` : "";
    const parts = name.split(/(?<=\/)/).flatMap((part) => [part, h("wbr")]); // a line ends after a slash
    return rowOf([h("span", {}, ...parts), fmt(before), h("span", {}, h("b", {}, fmt(after)), spread), fmt(step)]);
  }));
}

let sortedBy = null; // the column of the sweep table that was clicked, and whether the largest is first
/** Several runs: the flags in which they differ, and their last metrics; runs that differ in the seed are one row. */
function sweepTable() {
  const all = families(), names = resultNames(), flagsOf = (family) => family.members[0].all_flags;
  const flags = [...new Set(all.flatMap((family) => Object.keys(flagsOf(family))))].filter((name) =>
    !NO_FLAGS.has(name) && new Set(all.map((family) => flagsOf(family)[name])).size > 1);
  const lines = all.map((family) => {
    const found = names.map((name) => family.members.map((run) => ends(run, name).after).filter((x) => x !== null));
    const steps = Math.max(...family.members.map((run) => run.step));
    const cells = [family.label, ...flags.map((name) => flagsOf(family)[name] ?? ""), family.members.length, steps];
    return {family, cells: [...cells, ...found.map((values) => (values.length ? mean(values) : null))], found};
  });
  const first = flags.length + 3, {column, most} = sortedBy ?? {column: first, most: true};
  const order = (x, y) => {
    const difference = Number(x ?? NaN) - Number(y ?? NaN);
    return Number.isNaN(difference) ? String(x ?? "").localeCompare(y ?? "", "en", {numeric: true}) : difference;
  };
  lines.sort((a, b) => (most ? -1 : 1) * order(a.cells[column], b.cells[column]));
  const heads = ["run", ...flags.map((name) => `--${name.replaceAll("_", "-")}`), "seeds", "step", ...names];
  const head = h("tr", {}, ...heads.map((name, i) => {
    const sort = () => {
      sortedBy = {column: i, most: i === column ? !most : i >= first};
      drawFirst();
      document.querySelectorAll("#first th button")[i].focus();
    };
    return h("th", {"aria-sort": i === column ? (most ? "descending" : "ascending") : null}, link(name, sort));
  }));
  return tableOf("runs, their flags and results", head, lines.map(({family, cells, found}) => h("tr", {},
    h("td", {}, dot(family.colour), h("bdi", {}, family.label)),
    ...cells.slice(1, first).map((cell) => h("td", {}, String(cell))),
    ...found.map((values, i) => h("td", {}, h("b", {}, fmt(cells[first + i])),
      values.length > 1 ? ` (${fmt3(Math.min(...values))} to ${fmt3(Math.max(...values))})` : null)))));
}

/** Three responses of the last validation, or of the last step whose samples were kept. */
function glimpse(run) {
  const own = rows.filter((row) => row.run === run), kind = own.some((row) => row.kind === "val") ? "val" : "train";
  const step = Math.max(...own.filter((row) => row.kind === kind).map((row) => row.step));
  const last = own.filter((row) => row.kind === kind && row.step === step);
  if (!last.length) return "";
  return h("div", {class: "glimpse"},
    h("h2", {}, `${KINDS[kind]} samples of step ${step} `, link(`show all ${last.length}`, () => showStep(run, step))),
    h("div", {class: "cards"}, ...byCard(last.slice(0, 3)).map(groupCard)));
}

let firstShown = "";
function drawFirst() {
  const [name] = resultNames(), several = runs.length > 1;
  const shown = JSON.stringify([name, runs.map((run) => [run.name, run.step]), sortedBy, rows.length, $("apart").checked]);
  if (shown === firstShown) return; // a refresh moves nothing
  firstShown = shown;
  if (!name) { $("first").replaceChildren(); return; }
  const curve = makeFigure("a:first", name, (place, read) => drawMetric(name, place, read));
  $("first").replaceChildren(...(several ? [sweepTable()] : [glimpse(runs[0]), beforeAndAfter(runs[0])]), curve);
  $("first").classList.toggle("several", several);
  paintDots();
}
