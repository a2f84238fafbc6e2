// Asks the server once a second and shows what it said. A server that goes is waited for.

import { byId, bytes, count, h, seconds, setText, share, whole } from "./dom.js";
import { SOURCES, addHistory, allPoints, historyPath, hitShare, latelyBySource, newest, promptSources, sumOf, time } from "./model.js";
import { lines, shares } from "./charts.js";
import { showLinks, showMisses, showTiers } from "./panels.js";
import { showHandoffs, showLive, showRecent } from "./requests.js";
import { ask, hintScroll, say, watch } from "./shell.js";
import { showTree } from "./tree.js";

const TREE_EVERY = 4, HISTORY_EVERY = 2;
let turn = 0;

async function look() {
  const now = await ask("stats");
  if (turn % HISTORY_EVERY === 0) addHistory(await ask(historyPath()));
  showAll(now);
  if (turn % TREE_EVERY === 0) showTree(await ask("cache/tree?depth=24&limit=1024"), now.cache.block_tokens, now.cache.tiers);
  turn += 1;
  say(now.cache.is_paused ? "paused" : "live", now.cache.is_paused ? "paused: no request is admitted" : "live");
}

function showAll(now) {
  const { cache } = now, last = newest();
  setText("model", `${now.model} on ${now.device}${now.role === "mixed" ? "" : `, ${now.role} instance`}`);
  setText("foot", `Headwater ${now.version}, up ${seconds(now.uptime_s)}, ${whole(now.engine.num_steps)} steps, ${share(now.engine.step_s ? now.engine.decide_s / now.engine.step_s : 0)} of their time for scheduling. A block is ${cache.block_tokens} tokens, ${bytes(now.block_bytes)}.`);
  showTiles(now, last);
  showCharts();
  showTiers(cache, now.block_bytes);
  showLinks(cache.links, last?.rates.links ?? {});
  showMisses(now);
  showHandoffs(now.handoffs);
  showLive(now);
  showRecent(now.recent);
  hintScroll();
}

function showTiles(now, last) {
  const { cache } = now, device = cache.tiers.device, sources = promptSources(now), prompts = sumOf(sources);
  setText("t-out", last ? count(last.rates.output_tokens) : "–");
  setText("t-prompt", last ? `${count(last.rates.prompt_tokens)} prompt tokens/s` : "");
  showLatency("t-ttft", last?.minute_ttft);
  showLatency("t-itl", last?.minute_itl);
  setText("t-hit", share(hitShare(latelyBySource()) ?? hitShare(sources)));
  setText("t-hit-all", `${count(prompts - (sources.computed ?? 0))} of ${count(prompts)} in all`);
  setText("t-running", whole(cache.num_running));
  setText("t-waiting", `${whole(cache.num_waiting)} waiting, ${whole(cache.num_preemptions)} preempted`);
  const used = device.num_blocks - device.free - device.evictable;
  setText("t-device", share(used / device.num_blocks));
  setText("t-device-blocks", `${whole(used)} of ${whole(device.num_blocks)} blocks`);
}

// Median and 99th percentile of the last minute.
function showLatency(id, quantiles) {
  setText(id, seconds(quantiles?.p50_s));
  setText(`${id}-99`, quantiles ? `p99 ${seconds(quantiles.p99_s)}` : "none in the last minute");
}

function showCharts() {
  const points = allPoints();
  const rate = (get, kind) => [{ get: (point) => get(point.rates), kind }];
  const latency = (name, kind) => [
    { get: (point) => point[name]?.p50_s, kind, label: "median" },
    { get: (point) => point[name]?.p99_s, kind, label: "p99", dashed: true },
  ];
  lines(byId("c-output"), { name: "generated", points, series: rate((rates) => rates.output_tokens, "device"), format: count, time });
  lines(byId("c-prompt"), { name: "of prompts, found and computed", points, series: rate((rates) => rates.prompt_tokens, "storage"), format: count, time, axis: true });
  lines(byId("c-ttft"), { name: "to the first token", points, series: latency("minute_ttft", "host"), format: seconds, time });
  lines(byId("c-itl"), { name: "between tokens", points, series: latency("minute_itl", "device"), format: seconds, time, axis: true });
  shares(byId("c-source"), SOURCES, points, { get: (point) => point.rates.by_source, label: "Share of prompt tokens by where their KV came from", time });
}

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([kind, text]) => h("span", {}, h("i", { class: `k-${kind}` }), text)));
}
legend("l-source", SOURCES.map((name) => [name, name]));
legend("l-tree", [["device", "device"], ["host", "host (striped)"], ["storage", "storage (dotted)"]]);
addEventListener("resize", () => { if (turn) showCharts(); hintScroll(); });
watch(look, () => { turn = 0; });
