// The prefix tree as an icicle: width is blocks, a row down is what follows.

import { byId, h, setText, whole } from "./dom.js";

const ROW = 29, ROWS = 8, THINNEST = 3;
let nodes = new Map();      // uid -> node with children and its size
let top = null;             // the virtual node above everything
let path = [];              // uids from the first run down to where we are
let focused = "0";
let blockTokens = 1;

// `tiers` has the counts of all cached blocks; the outline has limits of depth and size.
export function showTree(outline, tokens, tiers) {
  blockTokens = tokens;
  build(outline);
  path = path.filter((uid, i) => nodes.has(uid) && (i === 0 || nodes.get(path[i - 1])));
  const cached = Object.entries(tiers).filter(([, tier]) => tier.cached).map(([name, tier]) => `${whole(tier.cached)} on the ${name}`);
  setText("tree-sum", `${whole(top.total)} blocks drawn, in ${whole(outline.nodes.length)} of ${whole(outline.num_nodes)} runs; cached in all: ${cached.join(", ") || "none"}`);
  draw();
}

function build(outline) {
  nodes = new Map(outline.nodes.map((node) => [node.uid, { ...node, children: [], total: node.num_blocks }]));
  top = { uid: 0, children: [], num_blocks: 0, total: 0, num_children: outline.num_first, age: 0 };
  for (const node of nodes.values()) (nodes.get(node.parent) ?? top).children.push(node);
  for (const node of [...nodes.values()].reverse()) (nodes.get(node.parent) ?? top).total += node.total;
  for (const node of [top, ...nodes.values()]) {
    const hidden = node.num_children - node.children.length;
    if (hidden > 0) { node.children.push({ kind: "more", hidden, total: Math.max(1, node.total * 0.06), children: [] }); }
    node.children.sort((a, b) => b.total - a.total);
  }
  const { apart } = outline, held = Math.max(apart.device, apart.host, apart.stored);
  if (apart.num_namespaces) {
    top.children.push({ kind: "apart", apart, total: Math.max(held, 1), children: [] });
    top.total += Math.max(held, 1);
  }
}

function draw() {
  const box = byId("tree"), width = box.clientWidth;
  const root = path.length ? nodes.get(path[path.length - 1]) : top;
  const drawn = [];
  place(root, 0, 0, width, drawn);
  const deepest = Math.max(0, ...drawn.map(({ row }) => row));
  box.style.height = `${(Math.min(Math.max(deepest + 1, 3), ROWS) * ROW) + 2}px`;
  const hadFocus = box.contains(document.activeElement);
  box.replaceChildren(...drawn.map((entry) => element(entry, root)));
  if (!top.total) box.replaceChildren(h("p", { class: "none", style: { padding: "0 14px" } }, "Nothing is cached yet."));
  const current = box.querySelector(`[data-key="${CSS.escape(focused)}"]`) ?? box.querySelector(".run");
  if (current) { current.tabIndex = 0; if (hadFocus) current.focus(); }
  drawPath();
}

// Children lie side by side below their parent; what is left of its width is its own run.
function place(node, row, left, width, drawn) {
  drawn.push({ node, row, left, width });
  if (row + 1 >= ROWS) return;
  let at = left;
  for (const child of node.children) {
    const part = (width * child.total) / node.total;
    if (part < THINNEST) break;
    place(child, row + 1, at, part, drawn);
    at += part;
  }
}

function element({ node, row, left, width }, root) {
  const kind = node.kind ?? (node === top ? "whole" : node.device ? "device" : node.host ? "host" : "storage");
  const fresh = node === top || node.kind ? 1 : freshness(node.age);
  const key = keyOf(node);
  const button = h("button", {
    type: "button", role: "treeitem", tabindex: "-1", "data-key": key, "aria-level": row + 1,
    class: `run ${kind}${fresh < 0.62 ? " pale" : ""}`, "aria-label": describe(node),
    style: { left: `${left}px`, top: `${row * ROW + 1}px`, width: `${width}px` },
    onclick: () => enter(node, root), onfocus: () => look(node, key), onmouseenter: () => setText("tree-detail", describe(node)),
    onkeydown: (event) => walk(event, node, root),
  }, width > 46 ? h("span", {}, label(node, width)) : null);
  if (kind !== "more" && kind !== "apart" && kind !== "whole") button.style.setProperty("--fresh", fresh.toFixed(2));
  return button;
}

const keyOf = (node) => (node.kind ? `${node.kind}-${node.hidden ?? ""}` : String(node.uid));
const freshness = (age) => Math.max(0.3, 1 - Math.log2(1 + age) / 12);
const blocks = (n) => `${whole(n)} ${n === 1 ? "block" : "blocks"}`;

function label(node, width) {
  if (node.kind === "more") return `+${whole(node.hidden)} more`;
  if (node.kind === "apart") return width > 150 ? `salted: ${whole(node.total)}` : "salted";
  if (node === top) return blocks(node.total);
  return width > 110 ? blocks(node.num_blocks) : whole(node.num_blocks);
}

function describe(node) {
  if (node.kind === "more") return `${whole(node.hidden)} older branches that are not drawn`;
  if (node.kind === "apart") {
    const { apart } = node;
    return `${whole(apart.num_namespaces)} salted tenants with ${apart.is_whole ? "" : "more than "}${whole(apart.device)} blocks on the device, ${whole(apart.host)} on the host, ${whole(apart.stored)} in storage; nothing else about them is shown`;
  }
  if (node === top) return `Everything that is drawn: ${blocks(node.total)}`;
  const used = node.num_pins ? "in use now" : node.age === 0 ? "used last" : `last used ${whole(node.age)} requests ago`;
  return `Blocks ${whole(node.start)}–${whole(node.start + node.num_blocks)} of their path: ${blocks(node.num_blocks)} (${whole(node.num_blocks * blockTokens)} tokens); device ${whole(node.device)}, host ${whole(node.host)}, storage ${whole(node.stored)}; ${used}; ${whole(node.num_children)} branches`;
}

function look(node, key) {
  focused = key;
  setText("tree-detail", describe(node));
}

function enter(node, root) {
  if (node.kind || node === top) return;
  path = node === root ? path.slice(0, -1) : ancestors(node);
  focused = String(node.uid);
  draw();
}

function ancestors(node) {
  const found = [];
  for (let at = node; at; at = nodes.get(at.parent)) found.unshift(at.uid);
  return found;
}

function leave() {
  if (!path.length) return;
  focused = String(path[path.length - 1]);
  path = path.slice(0, -1);
  draw();
}

function walk(event, node, root) {
  const parent = node === root ? null : node.kind ? event.currentTarget && parentOf(node) : nodes.get(node.parent) ?? top;
  const beside = parent ? parent.children : [node];
  const at = beside.indexOf(node);
  const target = { ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1], ArrowUp: parent, ArrowDown: node.children[0] }[event.key];
  if (event.key === "Escape" || event.key === "Backspace") leave();
  else if (!target) { if (!event.key.startsWith("Arrow")) return; }
  else {
    const element = byId("tree").querySelector(`[data-key="${CSS.escape(keyOf(target))}"]`);
    if (element) { event.currentTarget.tabIndex = -1; element.tabIndex = 0; element.focus(); }
  }
  event.preventDefault();
}

const parentOf = (node) => [top, ...nodes.values()].find((other) => other.children.includes(node));

function drawPath() {
  const crumbs = [h("button", { type: "button", onclick: () => { path = []; draw(); } }, "everything")];
  path.forEach((uid, i) => {
    const node = nodes.get(uid);
    crumbs.push(h("span", { class: "muted" }, "›"), h("button", { type: "button", "aria-current": i === path.length - 1 ? "location" : false,
      onclick: () => { path = path.slice(0, i + 1); draw(); } }, blocks(node.num_blocks)));
  });
  byId("tree-path").replaceChildren(...(path.length ? crumbs : []));
}

let wasWide = 0;
new ResizeObserver(([entry]) => {
  if (top && Math.abs(entry.contentRect.width - wasWide) > 1) { wasWide = entry.contentRect.width; draw(); }
}).observe(byId("tree"));
