// Tiers, transfers and misses: bars of one answer.

import { lines } from "./charts.js";
import { byId, bytes, count, h, whole, words } from "./dom.js";
import { allPoints, promptSources, splitReasons, sumOf, time } from "./model.js";

const FINE = new Set(["closed", "none", undefined]);
const STORAGE_STATES = { closed: "", none: "", open: "resting after faults", half_open: "being tried again" };

export function showTiers(cache, blockBytes) {
  const entries = Object.entries(cache.tiers).filter(([, tier]) => tier.num_blocks > 0);
  const rows = entries.map(([name, tier]) => tierRow(name, tier, blockBytes));
  if (cache.storage) rows.push(storageRow(cache.storage, blockBytes));
  byId("tiers").replaceChildren(legend(), h("div", { class: "bars" }, ...rows, copiesRow(cache)));
}

const legend = () => h("p", { class: "legend" },
  h("span", {}, h("i", { class: "k-device leased" }), "in use: held, or cached and pinned"), h("span", {}, h("i", { class: "k-device faint" }), "idle: cached, may be evicted"), h("span", {}, h("i", { class: "empty" }), "free"));

// Blocks on both tiers, blocks on one only, and blocks that are on no tier any more.
function copiesRow(cache) {
  const stored = cache.storage ? [[cache.unstored_blocks, "left memory unstored"]] : [];
  const below = cache.tiers.host?.num_blocks ? [[cache.num_duplicates, "on device and host"], [cache.num_unwritten, "not written to the host"]] : [];
  const entries = [...below, ...stored, [cache.lost_blocks, "left their last tier"]];
  return h("p", { class: "numbers" }, ...entries.map(([n, text]) => h("span", {}, h("b", {}, whole(n)), ` ${text}`)));
}

function tierRow(name, tier, blockBytes) {
  const part = (n) => ({ width: `${(100 * n) / tier.num_blocks}%` });
  const leased = tier.cached - tier.evictable;
  const value = (label, n, key) => h("span", {}, h("b", { "data-value": `${name}.${key}` }, whole(n)), ` ${label}`);
  return h("div", {},
    head(name, `${whole(tier.num_blocks)} blocks, ${bytes(tier.num_blocks * blockBytes)}`, name),
    h("div", { class: "track" },
      h("span", { class: `k-${name} leased`, style: part(tier.held + leased), title: "in use" }),
      h("span", { class: `k-${name} faint`, style: part(tier.evictable), title: "kept for later" })),
    h("p", { class: "numbers" },
      value("held", tier.held, "held"), value("cached", tier.cached, "cached"), value("of it idle", tier.evictable, "evictable"),
      value("free", tier.free, "free"), value("evicted", tier.evicted, "evicted")));
}

function storageRow(storage, blockBytes) {
  const { used_bytes: reserved, capacity_bytes: room } = storage;
  const used = storage.num_blocks == null ? reserved : storage.num_blocks * blockBytes;
  const size = used == null ? "" : room ? `${bytes(used)} of ${bytes(room)}` : bytes(used);
  const state = STORAGE_STATES[storage.breaker] ?? storage.breaker;
  const writes = FINE.has(storage.write_breaker) ? "" : "writes fail or there is no room: nothing is written for now";
  return h("div", {},
    head(`storage (${storage.backend})`, [size, state].filter(Boolean).join(", "), "storage"),
    FINE.has(storage.breaker) ? null : h("p", { class: "fault" }, "reads fail: storage is not asked for now"),
    writes ? h("p", { class: "fault" }, writes) : null,
    h("div", { class: "track" }, h("span", { class: "k-storage faint", style: { width: used != null && room ? `${Math.min(100, (100 * used) / room)}%` : "0" } })),
    h("p", { class: "numbers" },
      h("span", {}, h("b", {}, storage.num_blocks == null ? "–" : whole(storage.num_blocks)), " blocks"),
      h("span", {}, h("b", {}, whole(storage.blocks_read)), " read"),
      h("span", {}, h("b", {}, whole(storage.blocks_written)), " written"),
      reserved == null ? null : h("span", {}, h("b", {}, bytes(reserved)), " reserved"),
      faults("faults", storage.reasons)));
}

// A count of failures with its reasons; red when there are any.
const faults = (label, reasons) => {
  const found = Object.entries(reasons).filter(([, n]) => n);
  const why = found.map(([reason, n]) => `${words(reason)} ${whole(n)}`).join(", ");
  return h("span", found.length ? { class: "fault" } : {}, h("b", {}, whole(found.reduce((sum, [, n]) => sum + n, 0))), ` ${label}`, why ? `: ${why}` : "");
};

const head = (name, note, kind) => h("p", { class: "bar-head" },
  h("span", {}, kind ? h("i", { class: `swatch k-${kind}` }) : null, kind ? ` ${name}` : name), h("span", { class: "muted" }, note));

export function showLinks(links, rates) {
  const moving = Object.entries(links).filter(([name]) => name !== "lookup");
  const rows = moving.map(([name, link]) => {
    const rate = rates[name] ?? 0, most = link.fastest_bytes_s;
    return h("div", {},
      head(words(name).replace(" to ", " → "), most ? `${bytes(rate)}/s of ${bytes(most)}/s` : "nothing moved yet"),
      h("div", { class: "track" }, h("span", { class: `k-${name.split("_to_")[0]}`, style: { width: most ? `${Math.min(100, (100 * rate) / most)}%` : "0" } })),
      h("p", { class: "numbers" }, h("span", {}, h("b", {}, bytes(link.num_bytes)), " in all"), h("span", {}, h("b", {}, whole(link.in_flight)), " in flight"), faults("failed", link.failures)));
  });
  byId("links").replaceChildren(rows.length ? h("div", { class: "bars" }, ...rows) : h("p", { class: "none" }, "No tier below the device has moved anything. --swap-space adds host memory."));
}

// Colours of the most frequent losses; further ones share the last.
const LOSS_KINDS = ["bad", "host", "peer", "storage", "device"];

// A request has one reason: that of its first block that was not found. All tokens it computed count for
// that reason, so "after a lost block" is the most that can have been computed before: new text that
// follows a lost block in the same prompt is part of it.
export function showMisses(now) {
  const { role, totals, cache: { ledger } } = now;
  if (role === "prefill") { showHandedMisses(ledger, promptSources(now)); return; }
  const { fresh, lost } = splitReasons(totals.prompt_tokens_computed_total);
  const sources = promptSources(now);
  const found = sumOf(sources) - (sources.computed ?? 0), all = Math.max(1, sumOf(sources));
  const losses = Object.entries(lost).sort((a, b) => b[1] - a[1]);
  const kinds = Object.fromEntries(losses.map(([reason], i) => [reason, LOSS_KINDS[Math.min(i, LOSS_KINDS.length - 1)]]));
  const part = (kind, n) => h("span", { class: `k-${kind}`, style: { width: `${(100 * n) / all}%` } });
  const total = (kind, name, n) => h("span", {}, h("i", { class: `swatch k-${kind}` }), ` ${name} `, h("b", {}, count(n)));
  byId("misses").replaceChildren(h("div", { class: "bars" },
    h("div", {},
      h("div", { class: "track" }, part("device", found), part("computed", sumOf(fresh)), part("bad", sumOf(lost))),
      h("p", { class: "numbers" }, total("device", "found", found), total("computed", "new text", sumOf(fresh)), total("bad", "after a lost block", sumOf(lost)))),
    reasons("New text", fresh, () => "computed", ledger),
    losses.length ? reasons("After a lost block: at most this much was computed before", lost, (reason) => kinds[reason], ledger)
      : h("p", { class: "numbers" }, ledger.queries ? "Nothing was lost: only new text is computed." : "No request has asked yet.")));
  showLosses(losses.map(([reason]) => reason), kinds);
}

// A prefill instance counts requests by reason; their tokens are counted by the decode instances.
function showHandedMisses(ledger, sources) {
  const rows = Object.entries(ledger.misses).sort((a, b) => b[1] - a[1]).map(([reason, n]) => h("p", { class: "bar-head" },
    h("span", {}, words(reason)), h("span", { class: "muted" }, h("b", { "data-value": `miss.${reason}` }, whole(n)), n === 1 ? " request" : " requests")));
  byId("misses").replaceChildren(h("div", { class: "bars" },
    h("p", { class: "numbers" }, h("span", {}, h("b", {}, count(sources.computed)), " tokens of prompts that were handed over were computed here")), h("div", {}, ...rows)));
}

// Reasons of one kind with their tokens, and the requests whose match ended for them.
function reasons(title, amounts, kind, ledger) {
  const rows = Object.entries(amounts).sort((a, b) => b[1] - a[1]).map(([reason, n]) => h("p", { class: "bar-head" },
    h("span", {}, h("i", { class: `swatch k-${kind(reason)}` }), ` ${words(reason)}`),
    h("span", { class: "muted" }, h("b", {}, count(n)), " tokens", requests(reason, ledger.misses[reason]))));
  return h("div", {}, h("p", { class: "group" }, title), ...rows);
}

const requests = (reason, n) => (n == null ? null : h("span", {}, ", ", h("span", { "data-value": `miss.${reason}` }, whole(n)), n === 1 ? " request" : " requests"));

function showLosses(names, kinds) {
  byId("c-lost").hidden = !names.length;
  if (!names.length) return;
  const series = names.slice(0, LOSS_KINDS.length).map((reason) => ({ get: (point) => point.rates.computed_by_reason[reason] ?? 0, kind: kinds[reason], label: words(reason) }));
  lines(byId("c-lost"), { name: "after a lost block, tokens/s", points: allPoints(), series, format: count, time, axis: true });
}
