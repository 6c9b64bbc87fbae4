"use strict";
// Elements, numbers and times as text. Text of a run goes in by textContent only: never as HTML.

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child != null && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const $ = (selector) => document.querySelector(selector);
const MAIN = $("main");

// A colour of the stylesheet, as canvas needs it.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function number(value) {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  if (!isFinite(value)) return isNaN(value) ? "NaN" : value > 0 ? "+inf" : "-inf";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2).replace(/\.?0+e/, "e");
  const [scale, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([s]) => size >= s) || [];
  if (scale) return `${+(value / scale).toPrecision(4)}${letter}`;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds && seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${+seconds.toFixed(1)} s`;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

const age = (wall) => (wall ? duration((Date.now() - Date.parse(wall)) / 1000) : "–");

const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const PLAIN = { __proto__: null, hold_rate: "cap the learning rate", commit: "action", abort: "action", verify: "check", intent: "action ordered",
  rebaseline: "new normal level", rejoined: "the loss came back", eval_shifted: "evaluations are above their trend",
  norms_stayed: "the newest norms are normal", else_happened: "something else happened that moves a loss" };
const words = (name) => PLAIN[name] || String(name).replaceAll("_", " ");

const severity = (name) => h("b", { class: `sev ${String(name).toLowerCase()}` }, name);

const chip = (text, tone = "") => h("span", { class: `chip ${tone}` }, text);

// A command, and the button that copies it.
function command(text) {
  const button = h("button", { type: "button", class: "copy", onclick: copy }, "copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code); // no clipboard without https: the text is selected
      button.textContent = "press Ctrl+C";
    }
    setTimeout(() => (button.textContent = "copy"), 2500);
  }
  const code = h("code", {}, text);
  button.setAttribute("aria-label", `copy: ${text}`);
  return h("div", { class: "command" }, code, button);
}

// What to do, step by step, each with its command to copy.
const advised = (steps) => h("ul", { class: "advice" }, steps.map((step) => h("li", {}, step.text, step.command && command(step.command))));

// Draws a part again, which `draw` returns; the focus stays on the same control.
function keepFocus(part, draw) {
  const label = (element) => element.getAttribute("aria-label") || element.textContent;
  const focused = part.contains(document.activeElement) && document.activeElement;
  const fresh = draw();
  if (focused) [...fresh.querySelectorAll(focused.tagName)].find((element) => label(element) === label(focused))?.focus();
}

function card(title, note, ...children) {
  const heading = h("h2", {}, title, note ? h("small", {}, ` ${note}`) : "");
  return h("section", { class: "card" }, heading, children);
}

// `head`: [text, "n" for numbers]. A cell is text or elements; on a phone it names its column.
function table(head, rows, kind = "stack") {
  const cells = (row) => row.map((cell, i) => h("td", { class: head[i][1], "data-of": head[i][3] ?? head[i][0] }, cell));
  const heads = head.map(([text, align, title]) => h("th", { scope: "col", class: align, title }, text));
  return h("table", { class: kind }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))));
}

// The loss of a run in a row of a list; `marks`: where it was rolled back, as shares of the width.
function sparkline(values, marks = []) {
  const finite = (values || []).filter(Number.isFinite);
  if (finite.length < 2) return h("span", { class: "dim" }, "–");
  const low = Math.min(...finite);
  const span = Math.max(...finite) - low || 1;
  const x = (i) => ((i / (values.length - 1)) * 100).toFixed(1);
  const points = values.map((y, i) => (Number.isFinite(y) ? `${x(i)} ${(24 - ((y - low) / span) * 22).toFixed(1)}` : null));
  const path = points.map((p, i) => (p ? `${points[i - 1] ? "L" : "M"}${p}` : "")).join("");
  const bad = values.flatMap((y, i) => (y == null || Number.isFinite(y) ? [] : [i]));
  const text = `loss ${number(finite[0])} to ${number(finite.at(-1))}${bad.length ? `, ${bad.length} of ${values.length} NaN or Inf` : ""}`;
  const rolled = marks.length ? `, rolled back ${plural(marks.length, "time")}` : "";
  const lines = marks.map((m) => svg("line", { x1: m * 100, x2: m * 100, y1: 0, y2: 26 }));
  return svg("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", role: "img", "aria-label": text + rolled },
    ...lines, svg("path", { d: path }), ...bad.map((i) => svg("line", { class: "nan", x1: x(i - 0.5), x2: x(i + 0.5), y1: 24, y2: 24 })));
}

function crumbs(...parts) {
  const separator = () => h("span", { class: "sep", "aria-hidden": "true" }, "›");
  $("#top").replaceChildren(
    h("nav", { "aria-label": "breadcrumb" }, h("a", { href: FROZEN ? null : UP, class: "brand" }, "supervise"),
      parts.map((part) => [separator(), part])),
    h("span", { id: "live", role: "status" }), h("button", { type: "button", class: "quiet", "aria-label": "keys and terms", title: "keys and terms (?)", onclick: help }, "?"));
}

function live(text, on = false) {
  const label = $("#live");
  if (label && label.textContent !== text) label.textContent = text;
  label?.classList.toggle("on", on);
}

const KEYS = [["← →", "earlier, later"], ["+ −", "zoom in, out"], ["0", "the whole run"],
  ["1 – 5", "boards"], ["/", "search or filter"], ["?", "keys and terms"],
  ["drag", "zoom to a range"], ["double click", "the whole run"], ["Ctrl + wheel", "zoom at the pointer"]];

const TERMS = [["attempt", "one launch of the job, or what follows a rollback"],
  ["rollback", "the job's weights become those of a savepoint, not of a checkpoint; its steps go on"],
  ["undone", "steps whose result a rollback or a relaunch took back: dashed, they do not count"],
  ["savepoint", "training state that the probe keeps in memory"], ["checkpoint", "the job's own file"],
  ["rule", "what is watched for; it fires past a limit, and is blind where it cannot be judged"],
  ["incident", "one problem, from the first sign of it to its verified end"],
  ["SEV0, SEV1, SEV2", "how grave an incident is, SEV0 the most"],
  ["runbook", "the actions that answer an incident, within a budget"],
  ["checking", "after an action: did it help?"], ["held", "no more automatic actions until `release`"],
  ["protection", "which ways back there are: rollback, relaunch"]];

function help() {
  const close = h("button", { type: "button", autofocus: true, onclick: () => box.remove() }, "close");
  const list = (rows, name) => h("dl", { class: "keys" }, rows.map(([key, text]) =>
    [h("dt", {}, name === "kbd" ? h("kbd", {}, key) : key), h("dd", {}, text)]));
  const box = h("dialog", { "aria-label": "keys and terms", onclose: () => box.remove() },
    h("h2", {}, "Keys"), list(KEYS, "kbd"), h("h2", {}, "Terms"), list(TERMS), close);
  document.body.append(box);
  box.showModal();
}
