// The router's page: who is registered, what each does, and how far its cache is known.

import { byId, count, h, seconds, setText, whole } from "./dom.js";
import { ask, say, watch } from "./shell.js";

const HEADS = ["instance", "role", "group", "state", "cache known", "running", "waiting", "leases", "from here", "tokens promised", "blocks known", "gaps", "seen"];

watch(async () => {
  const { policy, instances } = await ask("instances");
  const ready = instances.filter((entry) => entry.state === "ready" || entry.state === "live");
  const sum = (get) => instances.reduce((total, entry) => total + get(entry), 0);
  const roles = {};
  for (const entry of instances) roles[entry.role] = (roles[entry.role] ?? 0) + 1;
  setText("model", instances[0]?.model ?? "nobody has registered");
  setText("policy", `sent by ${policy.replaceAll("_", " ")}`);
  setText("t-ready", `${ready.length} of ${instances.length}`);
  setText("t-roles", Object.entries(roles).map(([role, n]) => `${n} ${role}`).join(", "));
  setText("t-alive", whole(sum((entry) => entry.num_alive)));
  setText("t-load", `${whole(sum((entry) => entry.load.running))} running, ${whole(sum((entry) => entry.load.waiting))} waiting, ${whole(sum((entry) => entry.load.leases))} leases`);
  setText("t-work", count(sum((entry) => entry.outstanding_tokens)));
  setText("t-blocks", count(sum((entry) => entry.known_blocks)));
  setText("t-trust", `${instances.filter((entry) => entry.trust === "exact").length} known exactly`);
  byId("instances").replaceChildren(instances.length ? table(instances) : h("p", { class: "none" }, "No instance has registered. headwater serve --router adds one."));
  say("live", "live");
});

function table(instances) {
  const head = h("tr", {}, ...HEADS.map((text, i) => h("th", { scope: "col", class: i > 4 ? "num" : false }, text)));
  return h("table", {}, h("thead", {}, head), h("tbody", {}, ...instances.map(row)));
}

function row(entry) {
  const numbers = [entry.load.running, entry.load.waiting, entry.load.leases, entry.num_alive, entry.outstanding_tokens, entry.known_blocks, entry.gaps];
  return h("tr", { "data-instance": entry.instance_id },
    h("td", {}, h("a", { href: `${entry.url}/dashboard`, rel: "noreferrer" }, entry.instance_id)),
    h("td", {}, entry.role),
    h("td", {}, entry.group),
    h("td", {}, h("span", { class: "pill" }, entry.state)),
    h("td", {}, h("span", { class: "pill" }, entry.trust)),
    ...numbers.map((n) => h("td", { class: "num" }, whole(n))),
    h("td", { class: "num" }, `${seconds(entry.seen_s_ago)} ago`));
}
