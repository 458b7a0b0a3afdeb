// Line charts and bars of time, as SVG. Each chart has a text that says what it shows, for those who do not see it.

import { clock, h, number, s, span } from "./dom.js";

const WIDTH = 340, HEIGHT = 150, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

function ticks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && out.length < 12; at += step) out.push(Number(at.toPrecision(12)));
  return out;
}

const bounds = (values) => {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
};

// series: [{name, xs, ys}] with null where a value is missing
export function lines(title, series) {
  const points = series.map(({ xs, ys }) => xs.map((x, i) => [x, ys[i]]).filter(([, y]) => y !== null && y !== undefined));
  const [left, right] = bounds(points.flat().map(([x]) => x));
  let [low, high] = bounds(points.flat().map(([, y]) => y));
  if (!Number.isFinite(low)) return null;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const x = (value) => LEFT + ((value - left) / (right - left || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const last = series.map(({ name }, i) => `${name}: ${number(points[i].at(-1)?.[1])}`).join(", ");
  const chart = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by step; newest ${last}` },
    ticks(low, high, 4).map((at) => [
      s("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }),
      s("text", { x: LEFT - 4, y: y(at) + 4, "text-anchor": "end" }, number(at)),
    ]),
    ticks(left, right, 5).filter(Number.isInteger).map((at) => s("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, at)),
    points.map((line, i) => [
      s("polyline", { class: `curve s${i % 6} d${Math.floor(i / 6) % 4}`, points: line.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }),
      (line.length === 1 ? line : line.length <= 60 ? line : []).map(([a, b]) =>
        s("circle", { class: `f${i % 6}`, cx: x(a), cy: y(b), r: 2.2 }, s("title", {}, `${series[i].name}, step ${a}: ${number(b)}`))),
    ]));
  return h("section", { class: "card" }, h("h2", {}, title), chart, h("small", {}, `newest ${last}`));
}

export const keys = (names) => h("p", {}, names.map((name, i) => h("span", { class: "key" },
  s("svg", { width: 22, height: 8, "aria-hidden": "true" }, s("line", { class: `curve s${i % 6} d${Math.floor(i / 6) % 4}`, x1: 0, x2: 22, y1: 4, y2: 4 })), name)));

const KINDS = ["rollouts", "pack", "train", "init", "push"];

// bars: [{lane, kind, step, start, end, state, ref}]; now: where bars without an end stop
export function gantt(bars, now) {
  if (!bars.length) return h("p", { class: "faint" }, "no step yet");
  const lanes = [...new Set(bars.map((bar) => bar.lane))].sort((a, b) => bars.findIndex((bar) => bar.lane === a) - bars.findIndex((bar) => bar.lane === b));
  const [start] = bounds(bars.map((bar) => bar.start));
  const [, end] = bounds(bars.map((bar) => bar.end ?? now));
  const wide = 1000, left = 150, row = 26, high = lanes.length * row + 26;
  const x = (at) => left + ((at - start) / (end - start || 1)) * (wide - left - 10);
  const chart = s("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${bars.length} pieces of work of ${lanes.join(", ")}; the table below has them` },
    ticks(0, (end - start) / 1000, 8).map((at) => [
      s("line", { class: "axis", x1: x(start + at * 1000), x2: x(start + at * 1000), y1: 0, y2: high - 18 }),
      s("text", { x: x(start + at * 1000), y: high - 4, "text-anchor": "middle" }, span(at * 1000)),
    ]),
    lanes.map((lane, i) => s("text", { x: 0, y: i * row + 17 }, lane)),
    bars.map((bar) => {
      const width = Math.max(2, x(bar.end ?? now) - x(bar.start)), kind = Math.max(0, KINDS.indexOf(bar.kind));
      const top = lanes.indexOf(bar.lane) * row + 4;
      const told = `${bar.kind} of step ${bar.step}, ${bar.ref}: ${span((bar.end ?? now) - bar.start)}, ${bar.state}, from ${clock(bar.start)}`;
      return s("g", {}, s("rect", { class: `f${kind}`, x: x(bar.start), y: top, width, height: 18, rx: 2, opacity: bar.end ? 1 : 0.6 }, s("title", {}, told)),
        width > 24 ? s("text", { x: x(bar.start) + 4, y: top + 13, style: null, class: "on" }, bar.step) : null);
    }));
  const used = KINDS.filter((kind) => bars.some((bar) => bar.kind === kind));
  const legend = h("p", {}, used.map((kind) => h("span", { class: "key" }, s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { class: `f${KINDS.indexOf(kind)}`, width: 12, height: 12 })), kind)));
  return h("div", {}, legend, h("div", { class: "scroll" }, h("div", { class: "wide" }, chart)));
}
