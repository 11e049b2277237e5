// What the runs are, their alerts, the theme; draws everything, and again when the runs have changed.

function drawRuns() {
  const all = (selector) => [...document.querySelectorAll(`#runs ${selector}`)];
  const open = all("details").map((details) => details.open), focus = all("summary").indexOf(document.activeElement);
  const cards = runs.map(runCard), folded = h("div", {class: "cards"}, ...cards);
  $("run-cards").replaceChildren(...(runs.length > MANY ? [more(`flags and machines of ${runs.length} runs`, folded)] : cards));
  $("comparisons").replaceChildren(...comparisons.map(comparisonCard));
  const alerts = runs.flatMap((run) => run.alerts.map((found) => alertCard(run, found)));
  $("alerts").replaceChildren(...(alerts.length ? [h("h2", {class: "hidden"}, "Alerts"), ...alerts]
    : [h("p", {class: "calm"}, "✓ No alerts.")]));
  all("details").forEach((details, i) => { details.open = open[i] ?? false; });
  all("summary")[focus]?.focus({preventScroll: true});
}

function runCard(run) {
  const flag = (name) => `--${name.replaceAll("_", "-")}`;
  const of = run.total_steps ? ` of ${run.total_steps}` : "";
  const usually = (usual) => (usual && usual !== "none" ? h("span", {class: "muted"}, ` default ${usual}`) : null);
  const flags = Object.entries(run.flags ?? {}).map(([name, [value, usual]]) =>
    h("li", {}, `${flag(name)} ${value}`, usually(usual)));
  const all = Object.fromEntries(Object.entries(run.all_flags).map(([name, value]) => [flag(name), value]));
  const script = run.script ?? "unknown script", several = runs.length > 1;
  return h("article", {class: "card run", "aria-label": `run ${run.name}`},
    h("header", {}, several ? dot(colourOf(run)) : null, h("h2", {}, h("bdi", {}, several ? run.name : script)),
      h("span", {class: `pill ${run.state.split(" ")[0]}`}, run.state)),
    h("progress", {max: run.total_steps || 1, value: run.step, "aria-label": "steps done"}),
    h("div", {class: "muted"}, several ? `${script}, ` : "", `step ${run.step}${of}`,
      run.seed === null ? "" : `, seed ${run.seed}`),
    run.flags === null ? h("p", {class: "muted"}, "Which flags differ from the defaults was not recorded.")
      : flags.length ? h("ul", {class: "flags", "aria-label": "flags that are not at their default"}, ...flags)
      : h("p", {class: "muted"}, "All flags have their default."),
    facts(run.facts), ...run.notes.map((note) => h("p", {class: "note"}, note)),
    run.lens.length ? more("tokens on which other flags' gradients differ most", htmlTable(run.lens)) : null,
    ...[["flag", all], ["package", run.packages]].filter(([, pairs]) => Object.keys(pairs).length)
      .map(([word, pairs]) => more(`all ${plural(Object.keys(pairs).length, word)}`, facts(pairs))));
}

function comparisonCard({table: rows, why}) {
  return h("article", {class: "card comparison", "aria-label": "comparison of two settings"},
    h("h2", {}, "Last validation, by seed and prompt"), rows ? htmlTable(rows) : h("p", {class: "muted"}, `Not compared: ${why}.`));
}

function alertCard(run, found) {
  const help = $(`help-${found.section}`);
  const first = found.steps.slice(0, 12).join(", ") + (found.steps.length > 12 ? ", …" : "");
  return h("div", {class: "card alert", role: "group", "aria-label": "alert"},
    h("strong", {}, "▲ ", found.text), runs.length > 1 ? h("bdi", {}, ` · ${run.name}`) : null,
    h("div", {class: "muted"}, found.steps.length ? `step ${first} ` : "",
      found.steps.length ? link("samples", () => showStep(run, found.steps[0])) : null),
    help ? more("what it means and what to do", h("div", {class: "help"}, help.content.cloneNode(true))) : null);
}

// ---- start, theme, refresh -------------------------------------------------------------------------------

function drawAll(fresh) {
  readIndex();
  drawRuns();
  drawFirst();
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
$("x-axis").addEventListener("change", drawCurves);
$("apart").addEventListener("change", () => { off.clear(); drawRuns(); drawFirst(); drawCurves(); });
$("smooth").addEventListener("input", () => {
  document.querySelector("output[for=smooth]").value = $("smooth").value === "0" ? "off" : `${$("smooth").value} %`;
  redrawAll("m:");
  redrawAll("a:");
});
$("open-all").addEventListener("click", () => {
  const all = [...document.querySelectorAll(".group")], open = all.some((group) => !group.open);
  for (const group of all) group.open = open;
  $("open-all").textContent = open ? "Close all" : "Open all";
});
const filter = later(150, () => { pages = 1; drawSamples(); });
$("sample-bar").addEventListener("input", filter);
$("sample-bar").addEventListener("reset", () => { onlyPrompt = null; filter(); });
$("colour").addEventListener("change", () => {
  for (const box of document.querySelectorAll(".tokens")) paint(box);
  drawScale();
});
$("new").addEventListener("click", () => { drawSamples(); $("samples").scrollIntoView(); });
$("more").addEventListener("click", () => { pages *= 2; drawSamples(); });

let stamp = null;
async function refresh() {
  try {
    const answer = await fetch("/data.json", {headers: stamp ? {"If-None-Match": stamp} : {}});
    if (answer.status === 200) {
      stamp = answer.headers.get("ETag");
      ({runs, comparisons} = await answer.json());
      drawAll(true);
    }
    const read = answer.ok || answer.status === 304;
    $("live").textContent = read ? `live, ${new Date().toLocaleTimeString()}` : "the run cannot be read any more";
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch fails with a TypeError
    $("live").textContent = "the server has ended; the page stays";
  }
  setTimeout(refresh, 2000);
}
if (LIVE) refresh(); else drawAll();
