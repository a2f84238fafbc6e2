// Two kinds of chart: a line, and shares that add up to one. Time runs to the right edge, now.

import { share, svg } from "./dom.js";
import { HISTORY } from "./model.js";

const LEFT = 46, TOP = 8;

// How many moments are drawn: a minute at first, and all of them once there are more.
export const span = (length) => (length <= HISTORY / 3 ? HISTORY / 3 : HISTORY);

function frame(box, format, top, length, { ago, steps }) {
  const width = Math.max(box.clientWidth, 120), height = Math.max(box.clientHeight, 60);
  const bottom = ago == null ? 4 : 20, most = span(length);
  const x = (i) => LEFT + ((width - LEFT - 2) * (most - length + i)) / (most - 1);
  const y = (value) => TOP + (height - bottom - TOP) * (1 - Math.min(value / top, 1));
  const parts = [];
  for (const part of steps) {
    const at = Math.round(y(part * top)) + 0.5;
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: at, y2: at }));
    parts.push(svg("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, format(part * top)));
  }
  if (ago != null) {
    parts.push(svg("text", { x: LEFT, y: height - 3 }, ago));
    parts.push(svg("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
  }
  return { x, y, parts, width, height };
}

function show(box, label, { parts, width, height }) {
  box.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...parts));
}

// One line over a faint wash; a null breaks it.
export function line(box, { name, values, kind, format, ago }) {
  const most = Math.max(0, ...values.filter((value) => value != null));
  const view = frame(box, format, nice(most), values.length, { ago, steps: [0, 1] });
  const floor = view.y(0).toFixed(1);
  for (const run of runs(values)) {
    const points = run.map((i) => `${view.x(i).toFixed(1)},${view.y(values[i]).toFixed(1)}`);
    if (points.length === 1) points.push(points[0]);
    const edge = (point) => `${point.split(",")[0]},${floor}`;
    view.parts.push(svg("path", { class: `wash f-${kind}`, d: `M${edge(points[0])}L${points.join("L")}L${edge(points.at(-1))}Z` }));
    view.parts.push(svg("path", { class: `line s-${kind}`, d: `M${points.join("L")}` }));
  }
  view.parts.push(svg("text", { class: "name", x: LEFT + 6, y: TOP + 12 }, name));
  show(box, `${name}: now ${format(values.at(-1))}, most ${format(most)}`, view);
}

// Shares of each moment, stacked; a moment without anything stays empty.
export function shares(box, names, moments, { ago, label }) {
  const view = frame(box, share, 1, moments.length, { ago, steps: [0, 0.5, 1] });
  const sums = moments.map((moment) => names.reduce((sum, name) => sum + (moment[name] ?? 0), 0));
  for (const run of runs(sums.map((sum) => (sum > 0 ? sum : null)))) {
    const ends = run.length === 1 ? [run[0] - 1, run[0]] : run;
    let below = ends.map(() => 0);
    for (const name of names) {
      const above = ends.map((i, n) => below[n] + (moments[Math.max(i, run[0])][name] ?? 0) / sums[Math.max(i, run[0])]);
      const edge = (heights) => ends.map((i, n) => `${view.x(i).toFixed(1)},${view.y(heights[n]).toFixed(1)}`);
      if (above.some((high, n) => high > below[n])) {
        view.parts.push(svg("path", { class: `area f-${name}`, d: `M${edge(above).join("L")}L${edge(below).reverse().join("L")}Z` }));
      }
      below = above;
    }
  }
  show(box, label, view);
}

function runs(values) {
  const found = [];
  let run = [];
  values.forEach((value, i) => {
    if (value != null) run.push(i);
    else if (run.length) { found.push(run); run = []; }
  });
  return run.length ? [...found, run] : found;
}

// The next round number above, so that the scale stands still.
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => value <= step * unit) * unit;
}
