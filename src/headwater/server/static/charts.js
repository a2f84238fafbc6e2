// Two kinds of chart over the same time axis: the last ten minutes, now at the right edge.

import { share, svg } from "./dom.js";

const LEFT = 46, TOP = 8, MINUTE_S = 60, NARROW = 340;

// `time` has `now` and `span` in seconds, and `gap`: points further apart are not joined.
function frame(box, format, top, time, { axis, steps }) {
  const width = Math.max(box.clientWidth, 120), height = Math.max(box.clientHeight, 60);
  const bottom = axis ? 20 : 4, right = width - 2;
  const x = (at) => right - ((right - LEFT) * Math.min(time.now - at, time.span)) / time.span;
  const y = (value) => TOP + (height - bottom - TOP) * (1 - Math.min(value / top, 1));
  const parts = [];
  const tick = (width < NARROW ? 5 : 2) * MINUTE_S;
  for (let ago = 0; ago <= time.span; ago += tick) {
    const at = x(time.now - ago).toFixed(1);
    parts.push(svg("line", { class: "grid tick", x1: at, x2: at, y1: TOP, y2: height - bottom }));
    if (axis) parts.push(svg("text", { x: at, y: height - 4, "text-anchor": ago ? (ago === time.span ? "start" : "middle") : "end" }, ago ? `−${ago / MINUTE_S}${ago === time.span ? " min" : ""}` : "now"));
  }
  for (const part of steps) {
    const at = Math.round(y(part * top)) + 0.5;
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width, y1: at, y2: at }));
    parts.push(svg("text", { x: LEFT - 7, y: at + 4, "text-anchor": "end" }, format(part * top)));
  }
  return { x, y, parts, width, height };
}

function show(box, label, { parts, width, height }) {
  box.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...parts));
}

// Lines from `points` of `{at, value…}`. The first series has a faint wash below it; a null breaks a line.
export function lines(box, { name, points, series, format, time, axis }) {
  const most = Math.max(0, ...points.flatMap((point) => series.map(({ get }) => get(point) ?? 0)));
  const view = frame(box, format, nice(most), time, { axis, steps: [0, 1] });
  const floor = view.y(0).toFixed(1);
  series.forEach(({ get, kind, dashed }, number) => {
    for (const run of runs(points, (point) => get(point) != null, time.gap)) {
      const path = run.map((point) => `${view.x(point.at).toFixed(1)},${view.y(get(point)).toFixed(1)}`);
      if (path.length === 1) path.push(path[0]);
      const edge = (point) => `${point.split(",")[0]},${floor}`;
      if (!number) view.parts.push(svg("path", { class: `wash f-${kind}`, d: `M${edge(path[0])}L${path.join("L")}L${edge(path.at(-1))}Z` }));
      view.parts.push(svg("path", { class: `line s-${kind}${dashed ? " dashed" : ""}`, d: `M${path.join("L")}` }));
    }
  });
  view.parts.push(svg("text", { class: "name", x: LEFT + 6, y: TOP + 12 }, name));
  const last = points.at(-1);
  const now = series.map(({ get, label }) => `${label ?? "now"} ${format(last ? get(last) : null)}`).join(", ");
  show(box, `${name}: ${now}, most ${format(most)}`, view);
}

// Shares of each point, stacked; a point without anything stays empty. `get` gives amounts by name.
export function shares(box, names, points, { get, label, time }) {
  const view = frame(box, share, 1, time, { axis: true, steps: [0, 0.5, 1] });
  const sum = (point) => names.reduce((total, name) => total + (get(point)[name] ?? 0), 0);
  for (const run of runs(points, (point) => sum(point) > 0, time.gap)) {
    const ends = run.length > 1 ? run.map((point) => [point.at, point]) : [[run[0].at - time.gap / 3, run[0]], [run[0].at, run[0]]];
    let below = ends.map(() => 0);
    for (const name of names) {
      const above = ends.map(([, point], n) => below[n] + (get(point)[name] ?? 0) / sum(point));
      const edge = (heights) => ends.map(([at], n) => `${view.x(at).toFixed(1)},${view.y(heights[n]).toFixed(1)}`);
      if (above.some((high, n) => high > below[n])) {
        view.parts.push(svg("path", { class: `area f-${name}`, d: `M${edge(above).join("L")}L${edge(below).reverse().join("L")}Z` }));
      }
      below = above;
    }
  }
  show(box, label, view);
}

// Points that are drawn as one piece.
function runs(points, has, gap) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (run.length && (!has(point) || point.at - run.at(-1).at > gap)) { found.push(run); run = []; }
    if (has(point)) run.push(point);
  }
  return run.length ? [...found, run] : found;
}

// The next round number above, so that the scale stands still.
function nice(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => value <= step * unit) * unit;
}
