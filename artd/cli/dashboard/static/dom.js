// Builds elements. Texts become text nodes, so nothing that a model or a user wrote is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
// Control characters, and those that turn the direction of a text or show as nothing. Tab and line feed stay.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const plain = (text) => String(text).replace(HIDDEN, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : plain(child))));
  return element;
}

export const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);

export async function ask(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (answer.status === 401) throw new Error("The link has expired: open the one that `artd dashboard` printed last.");
  const told = await answer.json();
  if (!answer.ok) throw new Error([told.error, told.next && `Next: ${told.next}`].filter(Boolean).join(". "));
  return told;
}

export const query = (fields) => {
  const out = new URLSearchParams();
  for (const [name, value] of Object.entries(fields)) {
    for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined) out.append(name, one);
  }
  return out.size ? `?${out}` : "";
};

export function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const clock = (ms) => new Date(ms).toLocaleString("sv");
export const time = (ms) => (ms ? h("time", { datetime: new Date(ms).toISOString() }, clock(ms)) : "");

export function span(ms) {
  const seconds = ms / 1000;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export const bytes = (count) => {
  let unit = 0;
  for (; count >= 1024 && unit < 4; unit++) count /= 1024;
  return `${number(Number(count.toPrecision(3)))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

const TONE = {
  good: ["ok", "ready", "busy", "active", "live", "succeeded", "committed", "trained"],
  bad: ["broken", "quarantined", "failed", "degraded", "down"],
  warn: ["backoff", "paused", "starting", "draining", "sending", "running", "abandoned", "discarded"],
};
export const state = (word) => h("span", { class: Object.keys(TONE).find((tone) => TONE[tone].includes(word)) ?? "faint" }, word);

// columns: [title, row => content, numeric?]
export function table(caption, columns, rows) {
  const head = h("tr", {}, columns.map(([title, , numeric]) => h("th", { scope: "col", class: numeric ? "number" : null }, title)));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell, numeric]) => h("td", { class: numeric ? "number" : null }, cell(row)))));
  const empty = rows.length ? [] : [h("tr", {}, h("td", { colspan: columns.length, class: "faint" }, "nothing yet"))];
  return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body, empty)));
}
