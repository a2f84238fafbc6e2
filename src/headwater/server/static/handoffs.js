// Hand-offs as a drawing: prefill instances on the left, decode instances on the right.

import { byId, bytes, svg, whole } from "./dom.js";

const ROW = 54, BOX = 40, TOP = 4;

export function showHandoffs(instances, lost, prefills) {
  const gone = lost.map((entry) => ({ ...entry, state: "lost" }));
  const all = [...instances, ...gone];
  const left = all.filter((entry) => entry.role === "prefill"), right = all.filter((entry) => entry.role === "decode");
  byId("handoffs-card").hidden = !left.length && !right.length;
  if (!left.length && !right.length) return;
  const box = byId("handoffs"), width = Math.max(box.clientWidth, 280);
  const height = TOP + ROW * Math.max(left.length, right.length, 1);
  const wide = Math.min(250, width * 0.36);
  const place = (entries, x) => new Map(entries.map((entry, i) => [entry.instance_id, { x, y: TOP + i * ROW }]));
  const from = place(left, 0), to = place(right, width - wide);
  const drawn = prefills.filter((pair) => from.has(pair.prefill) && to.has(pair.decode));
  const most = Math.max(1, ...drawn.map((pair) => pair.requests));
  const parts = drawn.flatMap((pair) => arrow(from.get(pair.prefill), to.get(pair.decode), wide, pair, most));
  for (const entry of left) parts.push(...node(entry, from.get(entry.instance_id), wide, "sent"));
  for (const entry of right) parts.push(...node(entry, to.get(entry.instance_id), wide, "received"));
  const label = drawn.map((pair) => `${pair.prefill} to ${pair.decode}: ${whole(pair.requests)} requests`).join("; ");
  box.style.height = `${height}px`;
  box.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label || "No hand-off yet" }, ...parts));
}

// A curve from a prefill to a decode instance, as wide as its share of the requests.
function arrow(a, b, wide, pair, most) {
  const x1 = a.x + wide, x2 = b.x, y1 = a.y + BOX / 2, y2 = b.y + BOX / 2, middle = (x1 + x2) / 2;
  const stroke = 1.5 + (5 * pair.requests) / most;
  return [
    svg("path", { class: "flow", d: `M${x1},${y1}C${middle},${y1} ${middle},${y2} ${x2 - 9},${y2}`, "stroke-width": stroke.toFixed(1) }),
    svg("path", { class: "flow-head", d: `M${x2},${y2}l-10,-6v12Z` }),
    svg("text", { class: "name", x: middle, y: (y1 + y2) / 2 - stroke / 2 - 3, "text-anchor": "middle" }, `${whole(pair.requests)}`),
  ];
}

function node(entry, { x, y }, wide, way) {
  const isLost = entry.state === "lost", report = entry.report;
  const note = report ? `${bytes(report[`${way}_bytes`])} ${way}` : "lost";
  const failed = report?.failed_handoffs ? `, ${whole(report.failed_handoffs)} failed` : "";
  const long = Math.floor((wide - 16) / 7), name = entry.instance_id;
  const last = isLost && report ? `lost; ${bytes(report[`${way}_bytes`])}` : note + failed;
  return [
    svg("rect", { class: isLost ? "node bad" : "node", x: x + 0.5, y: y + 0.5, width: wide - 1, height: BOX, rx: 8 }),
    svg("text", { class: "name", x: x + 9, y: y + 17 }, svg("title", {}, name), name.length > long ? `…${name.slice(1 - long)}` : name),
    svg("text", { class: isLost || failed ? "bad" : "", x: x + 9, y: y + 33 }, last),
  ];
}
