// What the other files use: elements, text, numbers. What comes from a run is only ever inserted as text (`h`, `put`),
// never as HTML. The five files are one script, in the order base, curves, samples, results, page.
"use strict";
const $ = (id) => document.getElementById(id);
const LIVE = $("data") === null; // served by --serve: data and chunks are fetched, and fetched again
let {runs, comparisons} = LIVE ? {runs: [], comparisons: []} : JSON.parse($("data").textContent);

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

// control and format characters (right-to-left marks, zero width), private and unassigned ones
const ODD = /[\p{C}\u2028\u2029]/u;

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
  const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([unit]) => Math.abs(x) >= unit) ?? [];
  return unit ? Number((x / unit).toPrecision(4)) + letter : fmt(x);
}

function fmtTime(s) {
  if (s < 120) return `${fmt(s)} s`;
  return s < 7200 ? `${fmt3(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
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
/** rows: of text, the heading first. */
function htmlTable(rows) {
  const [heading, ...rest] = rows.map((row, i) => h("tr", {}, ...row.map((cell) => h(i ? "td" : "th", {}, cell))));
  return h("div", {class: "scroll"}, h("table", {}, h("thead", {}, heading), h("tbody", {}, ...rest)));
}
function facts(pairs) {
  const rows = Object.entries(pairs).map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]);
  return h("dl", {}, ...rows.flat());
}
function link(text, action) { return h("button", {type: "button", class: "link", onclick: action}, text); }
function dot(name, title = null) { return h("span", {class: "dot", "data-c": name, title}); }
/** Gives every `dot` its colour: the content security policy allows no style attribute. */
function paintDots() {
  for (const element of document.querySelectorAll("[data-c]")) element.style.background = `var(--${element.dataset.c})`;
}
function more(summary, content) { return h("details", {}, h("summary", {}, summary), content); }
