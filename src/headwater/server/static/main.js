// Asks the server once a second and shows what it said. A server that goes is waited for.

import { byId, bytes, count, h, seconds, setText, share, whole } from "./dom.js";
import { HISTORY, SOURCES, between, hitShare, isRestart, lately } from "./model.js";
import { line, shares, span } from "./charts.js";
import { showHandoffs, showLinks, showLive, showMisses, showRecent, showTiers } from "./panels.js";
import { ask, say, watch } from "./shell.js";
import { showTree } from "./tree.js";

const TREE_EVERY = 4;
const history = [];
let before = null, turn = 0;

async function look() {
  const now = await ask("stats");
  take(now);
  if (turn % TREE_EVERY === 0) showTree(await ask("cache/tree?depth=24&limit=1024"), now.cache.block_tokens, now.cache.tiers);
  turn += 1;
  say(now.cache.is_paused ? "paused" : "live", now.cache.is_paused ? "admits nobody" : "live");
}

function take(now) {
  if (before && isRestart(before, now)) { before = null; history.push(null); }
  if (before && now.uptime_s > before.uptime_s) history.push(between(before, now));
  while (history.length > HISTORY) history.shift();
  before = now;
  showAll(now);
}

function showAll(now) {
  const { cache } = now, points = history.filter(Boolean), last = points[points.length - 1];
  setText("model", `${now.model} on ${now.device}`);
  setText("foot", `Headwater ${now.version}, up ${seconds(now.uptime_s)}, ${whole(now.engine.num_steps)} steps, ${share(now.engine.step_s ? now.engine.decide_s / now.engine.step_s : 0)} of them deciding. A block is ${cache.block_tokens} tokens, ${bytes(now.block_bytes)}.`);
  showTiles(now, points, last);
  showCharts();
  showTiers(cache, now.block_bytes);
  showLinks(cache.links, last?.links ?? {});
  showMisses(cache.ledger);
  showHandoffs(now.handoffs);
  showLive(now);
  showRecent(now.recent);
}

function showTiles(now, points, last) {
  const { cache } = now, device = cache.tiers.device;
  const mean = (name, q) => { const found = lately(points, (point) => point[name]?.[q]); return found.length ? found[found.length - 1] : null; };
  setText("t-out", last ? count(last.output) : "–");
  setText("t-prompt", last ? `${count(last.prompt)} prompt tokens/s` : "");
  setText("t-ttft", seconds(mean("ttft", "p50")));
  setText("t-ttft-95", mean("ttft", "p95") == null ? "median, lately" : `95 % within ${seconds(mean("ttft", "p95"))}`);
  setText("t-itl", seconds(mean("itl", "p50")));
  setText("t-itl-95", mean("itl", "p95") == null ? "median, lately" : `95 % within ${seconds(mean("itl", "p95"))}`);
  const recent = Object.fromEntries(SOURCES.map((name) => [name, lately(points, (point) => point.sources[name], 30).reduce((a, b) => a + b, 0)]));
  const ever = now.totals.prompt_tokens_by_source_total;
  setText("t-hit", share(hitShare(recent) ?? hitShare(ever)));
  const found = Object.values(cache.ledger.found_tokens).reduce((a, b) => a + b, 0);
  setText("t-hit-all", `${count(found)} of ${count(cache.ledger.query_tokens)} tokens`);
  setText("t-running", whole(cache.num_running));
  setText("t-waiting", `${whole(cache.num_waiting)} waiting, ${whole(cache.num_preemptions)} preempted`);
  const used = device.num_blocks - device.free - device.evictable;
  setText("t-device", share(used / device.num_blocks));
  setText("t-device-blocks", `${whole(used)} of ${whole(device.num_blocks)} blocks`);
}

function showCharts() {
  const values = (get) => history.map((point) => (point ? get(point) ?? null : null));
  const ago = howLong();
  line(byId("c-output"), { name: "generated", values: values((point) => point.output), kind: "device", format: count });
  line(byId("c-prompt"), { name: "of prompts, found and computed", values: values((point) => point.prompt), kind: "storage", format: count, ago });
  line(byId("c-ttft"), { name: "to the first token", values: values((point) => point.ttft?.p50), kind: "host", format: seconds });
  line(byId("c-itl"), { name: "between tokens", values: values((point) => point.itl?.p50), kind: "device", format: seconds, ago });
  shares(byId("c-source"), SOURCES, history.map((point) => point?.sources ?? {}), { ago, label: "Share of prompt tokens by where their KV came from" });
}

// What the left edge of the charts is.
function howLong() {
  const points = history.filter(Boolean);
  if (points.length < 2) return "";
  const each = (points.at(-1).at - points[0].at) / (points.length - 1);
  return `${seconds(Math.round(each * span(history.length)))} ago`;
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([kind, text]) => h("span", {}, h("i", { class: `k-${kind}` }), text)));
}
legend("l-source", SOURCES.map((name) => [name, name]));
legend("l-tree", [["device", "device"], ["host", "host (striped)"], ["storage", "storage (dotted)"]]);
addEventListener("resize", () => before && showCharts());
watch(look, () => { turn = 0; });
