// Samples: their chunks, the filters, groups side by side, tokens and their numbers.

const FIRST = 6; // groups that are shown before "Show more"
const KINDS = {train: "Training", val: "Validation"};
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
      for (let i = 0; i < row.length; i++) bits[i] = (planes[start + i] << 24) | (planes[half + start + i] << 16);
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

// ---- which are shown -------------------------------------------------------------------------------------

let onlyPrompt = null, pages = 1, asked = 0;

/** The rows that match the form. Text is looked for in all chunks, which takes a moment. */
async function matching(mine) {
  const between = (name, value) => {
    const [least, most] = ["min", "max"].map((end) => $(`f-${name}-${end}`).value);
    if (value === null) return least === "" && most === "";
    return (least === "" || value >= Number(least)) && (most === "" || value <= Number(most));
  };
  const is = (name, value) => $(`f-${name}`).value === "" || $(`f-${name}`).value === value;
  const found = rows.filter((row) => is("run", row.run.name)
    && ["kind", "source", "finish"].every((name) => is(name, row[name]))
    && ["step", "score", "length"].every((name) => between(name, row[name]))
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
      for (const row of unread.get(key)) {
        const {prompt, response, tool_errors: errors} = texts[row.at];
        row.text = [prompt, response, ...errors ?? []].join("\n").toLowerCase();
      }
    }));
  }
  return found.filter((row) => row.text.includes(text));
}

const scores = (group) => group.map((row) => row.score ?? 0);
const ORDERS = { // the groups with the largest number first
  new: (group) => group[0].step,
  old: (group) => -group[0].step,
  low: (group) => -mean(scores(group)),
  high: (group) => mean(scores(group)),
  spread: (group) => Math.max(...scores(group)) - Math.min(...scores(group)),
  long: (group) => Math.max(...group.map((row) => row.length)),
};

/** What the line above the samples says. */
function counted(found, groups) {
  const kept = runs.reduce((sum, run) => sum + run.samples.kept, 0);
  const [here, all] = [rows.length, kept].map((n) => n.toLocaleString("en"));
  if (!kept) return "No samples yet: none were kept (--save-rollouts), and none were validated.";
  const of = found.length < rows.length ? `, of ${plural(rows.length, "response")}` : "";
  const said = [`${plural(found.length, "response")} in ${plural(groups, "group")}${of}.`];
  if (rows.length < kept) said.push(`The page holds ${here} of ${all} that the runs kept (--max-mb).`);
  const trained = runs.some((run) => run.samples.has_training);
  return [...said, ...(trained ? [] : ["No training samples were kept: --save-rollouts keeps them."])].join(" ");
}

let cards = new Map(); // what is shown: {key: element}, kept over a refresh so that nothing moves
/** fresh: the runs' files have changed. Then what is being read stays until the reader asks for what is new. */
async function drawSamples(fresh = false) {
  const mine = ++asked, found = await matching(mine);
  if (asked !== mine || found === null) return;
  const size = ORDERS[$("f-sort").value], groups = byCard(found).sort((a, b) => size(b) - size(a));
  const shown = groups.slice(0, pages * FIRST);
  $("count").textContent = counted(found, groups.length);
  $("one-prompt").hidden = onlyPrompt === null;
  const before = cards, keyOf = (group) => group[0].card + group.map((row) => row.at);
  const reading = fresh && before.size && $("cards").getBoundingClientRect().top < innerHeight;
  $("new").hidden = !(reading && shown.some((group) => !before.has(keyOf(group))));
  if (reading) return;
  cards = new Map(shown.map((group) => [keyOf(group), before.get(keyOf(group)) ?? groupCard(group)]));
  const wanted = [...cards.values()];
  for (const element of [...$("cards").children]) if (!wanted.includes(element)) element.remove();
  wanted.forEach((element, i) => {
    const now = $("cards").children[i] ?? null;
    if (now !== element) $("cards").insertBefore(element, now);
  });
  $("more").hidden = shown.length === groups.length;
}
function byCard(found) {
  const groups = new Map();
  for (const row of found) groups.set(row.card, [...(groups.get(row.card) ?? []), row]);
  return [...groups.values()];
}

const filling = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (!entry.isIntersecting) return;
  filling.unobserve(entry.target);
  entry.target.fill();
}), {rootMargin: "400px"});

function groupCard(group) {
  const {run, step, kind, source, prompt, chunk: key, card} = group[0];
  const size = rows.filter((row) => row.card === card).length;
  const known = group.filter((row) => row.score !== null).map((row) => row.score);
  const how = (group.length === size ? `${size} responses` : `${group.length} of ${size} responses`)
    + (known.length ? `, mean score ${fmt(mean(known))}` : "");
  const again = new Set(rows.filter((row) => row.prompt === prompt).map((row) => row.card)).size;
  const body = h("div", {}, h("p", {class: "muted"}, "…"));
  const shape = `card sample-group${size > 1 ? " many" : ""}`;
  const element = h("article", {class: shape, "aria-label": `samples of step ${step}`},
    h("header", {}, runs.length > 1 ? h("b", {}, h("bdi", {}, run.name)) : null, h("b", {}, `step ${step}`),
      h("span", {}, KINDS[kind].toLowerCase()), source ? h("bdi", {class: "muted"}, source) : null,
      size > 1 ? h("span", {class: "muted"}, how) : null,
      again > 1 ? link(`same prompt, ${again} times`, () => showPrompt(prompt)) : null), body);
  element.fill = async () => {
    const texts = await chunk(key), {prompt: asked, ground_truth: truth = null} = texts[group[0].at];
    const box = {class: "prompt", tabindex: 0, role: "group", "aria-label": "prompt"};
    const images = texts[group[0].at].images.map(picture);
    body.replaceChildren(h("div", box, h("div", {class: "text"}, asked), ...images),
      truth === null ? "" : h("p", {class: "muted truth"}, "ground truth ", truth),
      h("div", {class: "responses"}, ...group.map((row) => response(row, texts[row.at]))));
  };
  filling.observe(element);
  return element;
}

/** The image of a chunk's key, the i-th of its prompt. */
function picture(key, i) {
  const src = LIVE ? `/chunk/${key}` : `data:image/jpeg;base64,${$(`chunk-${key}`).textContent}`;
  return h("img", {src, alt: `image ${i + 1} of the prompt`});
}

function showPrompt(prompt) {
  onlyPrompt = prompt;
  $("f-sort").value = prompt === null ? "new" : "old";
  const back = link("show all prompts", () => showPrompt(null));
  $("one-prompt").replaceChildren("Only one prompt, over all steps. ", back);
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

// ---- one response and its tokens -------------------------------------------------------------------------

// field, its name, whether both signs mean something, the least and the largest value at which the colour may be full
const COLOURINGS = [
  ["none", "nothing"],
  ["logp", "log-prob", false, 1, 3],
  ["log_ratio", "ratio of new to old policy", true, .05],
  ["advantage", "advantage", true, .1],
  ["mismatch", "mismatch of trainer and engine", true, .01],
  ["entropy", "entropy", false, .5],
  ["ref", "log-ratio to the reference model", true, .1],
  ["value", "value of the critic", true, .1],
];
// a call as Hermes and Qwen, Mistral, Qwen3-Coder and Llama 3 write it
const CALLS = [/<tool_call>[^]*?(?:<\/tool_call>|$)/, /\[TOOL_CALLS\][^]*/, /<function=[^]*?(?:<\/function>|$)/,
  /<\|python_tag\|>[^]*/];
const CALL = new RegExp(CALLS.map((call) => call.source).join("|"), "g");

function fullScale(field) {
  const [, , , least, most = Infinity] = COLOURINGS.find(([name]) => name === field);
  return Math.min(most, Math.max(least, ...runs.map((run) => run.samples.scales[field] ?? 0)));
}
/** The class of page.css that colours a token. */
function shade(x, full) {
  if (Number.isNaN(x)) return "odd";
  const level = Math.min(8, Math.round((Math.abs(x) / full) * 8));
  return level ? (x > 0 ? "p" : "n") + level : "";
}

function response(row, sample) {
  const mask = expand(sample.response_mask);
  const box = h("div", {class: "tokens text", tabindex: 0, role: "group",
    "aria-label": `response of ${row.length} ${sample.tokens ? "tokens; arrow keys go through them" : "characters"}`});
  box.sample = {...sample, mask, loss: expand(sample.loss_mask), versions: expand(sample.weight_versions), spans: []};
  let start = 0;
  const parts = sample.turns ?? [{by: null, text: sample.response, tokens: sample.tokens?.length}];
  for (const turn of parts) {
    const place = turn.by ? h("div", {class: `turn ${turn.by}`}) : box;
    const calls = turn.by === "policy" ? [...turn.text.matchAll(CALL)] : [];
    const called = (at) => calls.some((call) => at >= call.index && at < call.index + call[0].length);
    const says = `${turn.by}${calls.length ? " calls a tool" : ""}${turn.reward ? `, reward ${fmt(turn.reward)}` : ""}`;
    if (turn.by) place.append(h("small", {}, says));
    let at = 0;
    const words = () => turn.text.match(/\s*(?:[\p{L}\p{N}_]+|[^])/gu) ?? [];
    for (const token of sample.tokens ? sample.tokens.slice(start, start + turn.tokens) : words()) {
      const span = h("span", {class: "t"}, token);
      if (called(at)) span.classList.add("call");
      if (sample.tokens) { span.at = box.sample.spans.length; box.sample.spans.push(span); }
      at += token.length;
      place.append(span);
    }
    start += turn.tokens ?? 0;
    if (turn.by) box.append(place);
  }
  box.dir = "auto"; // before the text is there, each token would have it all read again
  box.prompt = row.prompt;
  paint(box);
  const advantages = [...sample.numbers.advantage ?? []].filter((_, i) => !mask || mask[i]);
  const text = (value) => (typeof value === "number" ? fmt(value) : JSON.stringify(value));
  const rewards = Object.fromEntries(Object.entries(sample.rewards ?? {}).map(([name, value]) => [name, text(value)]));
  const element = h("section", {class: "response", "aria-label": `response ${row.sample + 1}`},
    h("header", {}, h("b", {}, `score ${fmt(row.score)}`),
      advantages.length ? h("b", {}, `advantage ${fmt3(mean(advantages))}`) : null,
      h("span", {}, plural(row.length, sample.tokens ? "token" : "character")),
      row.finish ? h("bdi", {}, row.finish) : null, compareButton(row, box), h("span", {class: "differing"})),
    sample.tool_errors?.length
      ? h("ul", {class: "tool-errors", "aria-label": "errors of tools"}, ...sample.tool_errors.map((e) => h("li", {}, e)))
      : null,
    box, Object.keys(rewards).length ? more("rewards", facts(rewards)) : null);
  if (base) markDifferences(box);
  return element;
}
function expand(parts) { return parts && parts.flatMap(([value, times]) => Array(times).fill(value)); }

function paint(box) {
  const field = $("colour").value, {numbers, spans, mask} = box.sample, values = numbers[field];
  const full = values && fullScale(field);
  spans.forEach((span, i) => {
    const given = mask && !mask[i], call = span.classList.contains("call") ? " call" : "";
    const differs = span.classList.contains("differs") ? " differs" : "";
    span.className = `t${given ? " off" : ""}${call}${differs} ${values && !given ? shade(values[i], full) : ""}`;
  });
}

// ---- what differs between two responses ------------------------------------------------------------------

const MOST_CELLS = 2e7; // of the table that aligns two responses; beyond it their middles count as different
let base = null; // the response that others to the same prompt are compared with: {prompt, tokens, box}

function compareButton(row, box) {
  const others = rows.filter((other) => other.prompt === row.prompt).length - 1;
  return others < 1 ? null : link("compare", (event) => {
    const again = base?.box === box;
    base = again ? null : {prompt: row.prompt, box, tokens: tokensOf(box)};
    for (const other of document.querySelectorAll(".tokens")) markDifferences(other);
    for (const button of document.querySelectorAll(".response .link[aria-pressed]")) button.removeAttribute("aria-pressed");
    if (!again) event.currentTarget.setAttribute("aria-pressed", "true");
  });
}
function tokensOf(box) { return [...box.querySelectorAll(".t")].map((span) => span.textContent); }

/** Marks the tokens that the base has not in this order. */
function markDifferences(box) {
  const compared = base && base.box !== box && base.prompt === box.prompt, spans = [...box.querySelectorAll(".t")];
  const tokens = tokensOf(box), same = compared ? common(base.tokens, tokens) : null;
  spans.forEach((span, i) => span.classList.toggle("differs", compared ? !same.has(i) : false));
  paint(box);
  const said = box.closest(".response")?.querySelector(".differing");
  if (said) {
    const count = spans.length - (same?.size ?? 0), missing = (base?.tokens.length ?? 0) - (same?.size ?? 0);
    said.textContent = compared ? `${count} differ, ${missing} missing` : "";
  }
}

/** The places in `b` of a longest common subsequence of `a` and `b`. */
function common(a, b) {
  const same = new Set();
  let start = 0, end = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) same.add(start++);
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) same.add(b.length - ++end);
  const [n, m] = [a.length - start - end, b.length - start - end];
  if (n * m > MOST_CELLS) return same;
  const lengths = new Uint32Array((n + 1) * (m + 1)), at = (i, j) => i * (m + 1) + j; // of what is left from (i, j) on
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      lengths[at(i, j)] = a[start + i] === b[start + j] ? lengths[at(i + 1, j + 1)] + 1
        : Math.max(lengths[at(i + 1, j)], lengths[at(i, j + 1)]);
    }
  }
  for (let i = 0, j = 0; i < n && j < m;) {
    if (a[start + i] === b[start + j]) { same.add(start + j); i++; j++; }
    else if (lengths[at(i + 1, j)] >= lengths[at(i, j + 1)]) i++;
    else j++;
  }
  return same;
}

function drawScale() {
  const field = $("colour").value;
  if (field === "none") { $("scale").replaceChildren(); return; }
  const [, , both] = COLOURINGS.find(([name]) => name === field), full = fullScale(field);
  const given = {log_ratio: [Math.exp(-full), Math.exp(full)], logp: [-full, 0], entropy: [0, full]};
  const ends = given[field] ?? [-full, full];
  const levels = Array.from({length: 17}, (_, i) => i - 8);
  const shown = levels.filter((level) => both || (field === "logp" ? level <= 0 : level >= 0));
  const steps = shown.map((level) => h("i", {class: shade(level, 8)}));
  $("scale").replaceChildren(fmt(ends[0]), h("span", {class: "steps"}, ...steps), fmt(ends[1]));
}

function showTip(span, spoken) {
  const box = span.closest(".tokens"), {numbers: n, mask, loss, versions} = box.sample, i = span.at;
  const logp = n.logp?.[i], old = logp - (n.log_ratio?.[i] ?? 0);
  const percent = Number((100 * Math.exp(logp)).toPrecision(2));
  const sampled = {
    "log-prob": n.logp && `${fmt3(logp)} (${percent} %)`,
    "log-prob before the update": n.logp && n.log_ratio && fmt3(old),
    "log-prob of the engine": n.logp && n.mismatch && fmt3(old - n.mismatch[i]),
    "ratio of new to old policy": n.log_ratio && fmt3(Math.exp(n.log_ratio[i])),
    advantage: n.advantage && fmt3(n.advantage[i]),
    mismatch: n.mismatch && fmt3(n.mismatch[i]),
    entropy: n.entropy && fmt3(n.entropy[i]),
    "log-prob of the reference": n.ref && fmt3(logp - n.ref[i]),
    "value of the critic": n.value && fmt3(n.value[i]),
    "sampled by weights of step": versions?.[i],
    "not trained": loss && !loss[i] ? "outside the loss" : undefined,
  };
  const lines = mask && !mask[i] ? {"not sampled": "given by the environment"} : sampled;
  const known = Object.fromEntries(Object.entries(lines).filter(([, value]) => value !== undefined));
  const place = `token ${i + 1} of ${box.sample.spans.length}, numbers within 1.6 %`;
  const text = h("div", {class: "text"}, span.textContent);
  $("tip").replaceChildren(text, h("div", {class: "muted"}, place), facts(known));
  $("tip").hidden = false;
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect(), size = $("tip").getBoundingClientRect();
  const below = at.bottom + 8 + size.height < innerHeight;
  $("tip").style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 4))}px`;
  $("tip").style.top = `${Math.max(4, below ? at.bottom + 8 : at.top - size.height - 8)}px`;
  if (spoken) $("say").textContent = $("tip").innerText;
}
function hideTip() {
  $("tip").hidden = true;
  for (const span of document.querySelectorAll(".t.cur")) span.classList.remove("cur");
}

$("main").addEventListener("mouseover", (event) => {
  const span = event.target.closest(".t");
  if (span?.at !== undefined) showTip(span); else hideTip();
});
$("main").addEventListener("mouseleave", hideTip);
$("main").addEventListener("focusout", hideTip);
$("main").addEventListener("keydown", (event) => {
  const spans = event.target.sample?.spans;
  const move = {ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity}[event.key];
  if (event.key === "Escape") hideTip();
  if (!spans?.length || !move) return;
  event.preventDefault();
  const now = spans.findIndex((span) => span.classList.contains("cur")); // -1: none yet
  const next = Math.max(0, Math.min(spans.length - 1, now + move));
  hideTip();
  spans[next].classList.add("cur");
  spans[next].scrollIntoView({block: "nearest"});
  showTip(spans[next], true);
});
