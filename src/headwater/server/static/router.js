// The router's page: each instance by name with its state, load, rates and latencies, and hand-offs.

import { byId, count, h, seconds, setText, share, whole } from "./dom.js";
import { showHandoffs } from "./handoffs.js";
import { ask, hintScroll, say, watch } from "./shell.js";

const HEADS = ["instance", "role", "state", "tokens/s", "prompt/s", "found", "first p50", "p99", "between p50", "p99", "running", "waiting", "leases", "from here", "promised", "cache", "blocks", "gaps", "group", "seen"];
let heads = HEADS; // without "group" while all instances are of one
const WORDS = new Set(["instance", "role", "state", "cache", "group"]);

watch(async () => {
  const { policy, instances, lost, prefills } = await ask("instances");
  instances.sort(byName);
  setText("model", instances[0]?.model ?? "no instance is registered");
  setText("policy", `routed by ${policy.replaceAll("_", " ")}`);
  showTiles(instances, lost);
  heads = new Set(instances.map((entry) => entry.group)).size > 1 ? HEADS : HEADS.filter((text) => text !== "group");
  const rows = [...instances.map(row), ...lost.map(lostRow)];
  byId("instances").replaceChildren(rows.length ? table(rows) : h("p", { class: "none" }, "No instance has registered. headwater serve --router adds one."));
  showHandoffs(instances, lost, prefills);
  hintScroll();
  say("live", "live");
});
addEventListener("resize", hintScroll);

const byName = (a, b) => a.instance_id.localeCompare(b.instance_id, "en", { numeric: true });

function showTiles(instances, lost) {
  const alive = instances.filter((entry) => entry.state !== "lost"); // the last report of a lost one is old
  const sum = (get) => alive.reduce((total, entry) => total + get(entry), 0);
  const worst = (name) => { const found = alive.map((entry) => entry.report[name]).filter((s) => s != null); return found.length ? Math.max(...found) : null; };
  const ready = instances.filter((entry) => entry.state === "ready").length;
  const gone = lost.length + instances.filter((entry) => entry.state === "lost").length;
  const roles = {};
  for (const entry of instances) roles[entry.role] = (roles[entry.role] ?? 0) + 1;
  setText("t-ready", `${ready} of ${instances.length + lost.length}`);
  setText("t-roles", [...Object.entries(roles).map(([role, n]) => `${n} ${role}`), ...(gone ? [`${gone} lost`] : [])].join(", "));
  byId("t-roles").classList.toggle("fault", gone > 0);
  setText("t-out", count(sum((entry) => entry.report.output_tokens_s)));
  setText("t-prompt", `${count(sum((entry) => entry.report.prompt_tokens_s))} prompt tokens/s`);
  setText("t-ttft", seconds(worst("ttft_p99_s")));
  setText("t-itl", worst("itl_p99_s") == null ? "of the slowest instance" : `${seconds(worst("itl_p99_s"))} between tokens; slowest instance`);
  const prompts = sum((entry) => (entry.report.hit_share == null ? 0 : entry.report.prompt_tokens_s));
  setText("t-hit", share(prompts ? sum((entry) => (entry.report.hit_share ?? 0) * entry.report.prompt_tokens_s) / prompts : null));
  setText("t-alive", whole(sum((entry) => entry.num_alive)));
  setText("t-load", `${whole(sum((entry) => entry.load.running))} running, ${whole(sum((entry) => entry.load.waiting))} waiting, ${whole(sum((entry) => entry.load.leases))} leases`);
  setText("t-blocks", count(sum((entry) => entry.known_blocks)));
  setText("t-trust", `${alive.filter((entry) => entry.trust === "exact").length} known exactly`);
}

function table(rows) {
  const head = h("tr", {}, ...heads.map((text) => h("th", { scope: "col", class: WORDS.has(text) ? false : "num" }, text)));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows));
}

const cell = (text) => h("td", { class: "num" }, text);
const pill = (text, isBad) => h("td", {}, h("span", { class: isBad ? "pill bad" : "pill" }, text));
const name = (entry) => h("td", { class: "name" }, h("a", { href: `${entry.url}/dashboard`, rel: "noreferrer", title: entry.instance_id }, entry.instance_id));

function row(entry) {
  const { report, load } = entry, isLost = entry.state === "lost";
  const said = (text) => cell(isLost ? "–" : text); // what it reported before it was lost is not true now
  return h("tr", { "data-instance": entry.instance_id },
    name(entry), h("td", {}, entry.role), pill(entry.state, isLost),
    ...[count(report.output_tokens_s), count(report.prompt_tokens_s), share(report.hit_share)].map(said),
    ...[report.ttft_p50_s, report.ttft_p99_s, report.itl_p50_s, report.itl_p99_s].map((s) => said(seconds(s))),
    ...[load.running, load.waiting, load.leases].map((n) => said(whole(n))),
    ...[entry.num_alive, entry.outstanding_tokens].map((n) => cell(whole(n))),
    pill(entry.trust, false), cell(whole(entry.known_blocks)), cell(whole(entry.gaps)),
    ...(heads === HEADS ? [h("td", {}, entry.group)] : []), cell(`${seconds(entry.seen_s_ago)} ago`));
}

// An instance that was removed: nothing is known of it but when it was last heard.
function lostRow(entry) {
  return h("tr", { "data-lost": entry.instance_id, class: "gone" },
    name(entry), h("td", {}, entry.role), pill("lost", true),
    h("td", { colspan: heads.length - 4, class: "fault" }, "no heartbeat; its requests continue elsewhere"), cell(`${seconds(entry.seen_s_ago)} ago`));
}
