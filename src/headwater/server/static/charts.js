// Two kinds of chart: lines, and shares that add up to one. Time runs to the right edge, now.

import { svg } from "./dom.js";
import { HISTORY } from "./model.js";

const LEFT = 44, BOTTOM = 18, TOP = 6;

function frame(box, format, top) {
  const width = Math.max(box.clientWidth, 120), height = Math.max(box.clientHeight, 80);
  const x = (i) => LEFT + ((width - LEFT - 2) * i) / (HISTORY - 1);
  const y = (value) => TOP + (height - BOTTOM - TOP) * (1 - Math.min(value / top, 1));
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(part * top)) + 0.5;
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: at, y2: at }));
    parts.push(svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, format(part * top)));
  }
  parts.push(svg("text", { x: LEFT, y: height - 3 }, "3 min ago"));
  parts.push(svg("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
  return { x, y, parts, width, height };
}

function show(box, label, { parts, width, height }) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...parts);
  box.replaceChildren(picture);
}

// `series` is [{values, kind, dash, wash}]; a null breaks the line.
export function lines(box, series, format, label) {
  const most = Math.max(0, ...series.flatMap((entry) => entry.values.filter((value) => value != null)));
  const view = frame(box, format, nice(most));
  for (const { values, kind, dash, wash } of series) {
    const start = HISTORY - values.length;
    for (const run of runs(values)) {
      const points = run.map((i) => `${view.x(start + i).toFixed(1)},${view.y(values[i]).toFixed(1)}`);
      if (points.length === 1) points.push(points[0]);
      if (wash) {
        const floor = view.y(0).toFixed(1);
        const [first] = points[0].split(","), [last] = points[points.length - 1].split(",");
        view.parts.push(svg("path", { class: `wash f-${kind}`, d: `M${first},${floor}L${points.join("L")}L${last},${floor}Z` }));
      }
      view.parts.push(svg("path", { class: `line s-${kind}${dash ? " dash" : ""}`, d: `M${points.join("L")}` }));
    }
  }
  show(box, label, view);
}

// Shares of each moment, stacked; a moment without anything stays empty.
export function shares(box, names, moments, format, label) {
  const view = frame(box, format, 1);
  const start = HISTORY - moments.length;
  const sums = moments.map((moment) => names.reduce((sum, name) => sum + (moment[name] ?? 0), 0));
  for (const run of runs(sums.map((sum) => (sum > 0 ? sum : null)))) {
    let below = run.map(() => 0);
    for (const name of names) {
      const above = run.map((i, n) => below[n] + (moments[i][name] ?? 0) / sums[i]);
      const low = below;
      if (run.some((_, n) => above[n] > low[n])) {
        const edge = (values, i, n, shift) => `${view.x(start + i + shift).toFixed(1)},${view.y(values[n]).toFixed(1)}`;
        const up = run.map((i, n) => edge(above, i, n, 0)), down = run.map((i, n) => edge(low, i, n, 0));
        if (run.length === 1) { up.unshift(edge(above, run[0], 0, -1)); down.unshift(edge(low, run[0], 0, -1)); }
        view.parts.push(svg("path", { class: `area f-${name}`, d: `M${up.join("L")}L${down.reverse().join("L")}Z` }));
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
    if (value == null) { if (run.length) found.push(run); run = []; } else run.push(i);
  });
  if (run.length) found.push(run);
  return found;
}

// The next round number above, so that the scale stands still.
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => value <= step * unit) * unit;
}
