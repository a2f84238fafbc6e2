// Tiers, transfers, misses and requests: bars and tables of one answer.

import { byId, bytes, h, seconds, setText, share, whole, words } from "./dom.js";
import { SOURCES } from "./model.js";

const FINE = new Set(["closed", "none", undefined]);
const STORAGE_STATES = { closed: "", none: "", open: "resting after faults", half_open: "being tried again" };

export function showTiers(cache, blockBytes) {
  const entries = Object.entries(cache.tiers).filter(([, tier]) => tier.num_blocks > 0);
  const rows = entries.map(([name, tier]) => tierRow(name, tier, blockBytes));
  if (cache.storage) rows.push(storageRow(cache.storage));
  byId("tiers").replaceChildren(h("div", { class: "bars" }, ...rows));
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

function storageRow(storage) {
  const used = storage.used_bytes, room = storage.capacity_bytes;
  const size = used == null ? "" : room ? `${bytes(used)} of ${bytes(room)}` : bytes(used);
  const state = STORAGE_STATES[storage.breaker] ?? storage.breaker;
  const writes = FINE.has(storage.write_breaker) ? "" : "writes fail or there is no room: nothing is written for now";
  return h("div", {},
    head(`storage (${storage.backend})`, [size, state].filter(Boolean).join(", "), "storage"),
    FINE.has(storage.breaker) ? null : h("p", { class: "fault" }, "reads fail: storage is not asked for now"),
    writes ? h("p", { class: "fault" }, writes) : null,
    h("div", { class: "track" }, h("span", { class: "k-storage faint", style: { width: used != null && room ? `${(100 * used) / room}%` : "0" } })),
    h("p", { class: "numbers" },
      h("span", {}, h("b", {}, storage.num_blocks == null ? "–" : whole(storage.num_blocks)), " blocks"),
      h("span", {}, h("b", {}, whole(storage.blocks_read)), " read"),
      h("span", {}, h("b", {}, whole(storage.blocks_written)), " written"),
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

export function showMisses(ledger) {
  const entries = Object.entries(ledger.misses).sort((a, b) => b[1] - a[1]);
  const most = entries.length ? entries[0][1] : 1;
  const rows = entries.map(([reason, n]) => h("div", {},
    h("p", { class: "bar-head" }, h("span", {}, words(reason)), h("span", { class: "muted", "data-value": `miss.${reason}` }, whole(n))),
    h("div", { class: "track" }, h("span", { class: "k-computed", style: { width: `${(100 * n) / most}%` } }))));
  byId("misses").replaceChildren(rows.length ? h("div", { class: "bars" }, ...rows)
    : h("p", { class: "none" }, ledger.queries ? "Every request found all that it could." : "No request has asked yet."));
}

// Both sides of prefill and decode apart: what is in flight holds a lease on the other side.
export function showHandoffs(handoffs) {
  const sides = Object.entries(handoffs);
  byId("handoffs-card").hidden = !sides.length;
  if (!sides.length) return;
  const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const why = (counts) => Object.entries(counts).map(([reason, n]) => `${words(reason)} ${whole(n)}`).join(", ");
  const rows = sides.map(([side, entry]) => h("tr", {}, h("td", {}, `as ${side}`),
    ...[entry.in_flight, entry.asks, entry.done].map((n) => h("td", { class: "num" }, whole(n))),
    h("td", { class: "num", title: why(entry.refusals) }, whole(sum(entry.refusals))),
    h("td", { class: "num", title: why(entry.failures) }, whole(sum(entry.failures))),
    h("td", { class: "num" }, bytes(entry.num_bytes))));
  const heads = ["", "leases now", "asks", "done", "refused", "failed", "moved"];
  byId("handoffs").replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((text, i) => h("th", { class: i ? "num" : false, scope: "col" }, text)))), h("tbody", {}, ...rows)));
}

export function showLive(stats) {
  const { cache, sequences } = stats;
  const hidden = cache.num_running + cache.num_waiting - sequences.length;
  setText("live-sum", hidden > 0 ? `the first ${sequences.length}` : "");
  const table = h("table", {}, h("thead", {}, row("th", ["request", "state", "prompt", "answer", "age"])),
    h("tbody", {}, ...sequences.map(liveRow)));
  byId("live").replaceChildren(sequences.length ? table : h("p", { class: "none" }, "Nothing runs and nothing waits."));
}

function liveRow(sequence) {
  const state = sequence.state === "waiting" ? `waits for ${sequence.waits_for}` : sequence.state;
  const done = Math.min(sequence.computed_tokens, sequence.prompt_tokens);
  const part = (n) => `${(100 * n) / sequence.prompt_tokens}%`;
  return h("tr", {},
    h("td", { class: "name", title: sequence.request_id }, sequence.request_id),
    h("td", {}, h("span", { class: "pill" }, state + (sequence.num_preemptions ? ` (preempted ${sequence.num_preemptions}×)` : ""))),
    h("td", {}, h("div", { class: "track progress", title: `${whole(done)} of ${whole(sequence.prompt_tokens)} tokens, ${whole(sequence.found_tokens)} found` },
      h("span", { class: "k-device", style: { width: part(sequence.found_tokens) } }),
      h("span", { class: "k-computed", style: { width: part(Math.max(0, done - sequence.found_tokens)) } }))),
    h("td", { class: "num" }, `${whole(sequence.output_tokens)} / ${whole(sequence.max_output_tokens)}`),
    h("td", { class: "num" }, seconds(sequence.age_s)));
}

let chosen = null;  // the request whose ledger is spelled out

export function showRecent(records) {
  const hadFocus = document.activeElement?.dataset.request;
  const table = h("table", {}, h("thead", {}, row("th", ["request", "prompt from", "found", "first", "whole", "end"])),
    h("tbody", {}, ...records.slice(0, 30).map(recentRow)));
  byId("recent").replaceChildren(records.length ? table : h("p", { class: "none" }, "No request has ended yet."));
  if (hadFocus) byId("recent").querySelector(`[data-request="${CSS.escape(hadFocus)}"]`)?.focus();
  const record = records.find((entry) => entry.request_id === chosen);
  if (record) setText("recent-detail", story(record));
}

function recentRow(record) {
  const parts = SOURCES.map((name) => h("span", { class: `k-${name}`, style: { width: `${(100 * (record.tokens_by_source[name] ?? 0)) / record.prompt_tokens}%` } }));
  return h("tr", { title: story(record) },
    h("td", { class: "name" }, h("button", { type: "button", class: "plain", "data-request": record.request_id,
      onclick: () => { chosen = record.request_id; setText("recent-detail", story(record)); } }, record.request_id)),
    h("td", {}, h("div", { class: "track progress" }, ...parts)),
    h("td", { class: "num" }, share(record.cached_tokens / record.prompt_tokens)),
    h("td", { class: "num" }, seconds(record.first_token_s)),
    h("td", { class: "num" }, seconds(record.duration_s)),
    h("td", {}, h("span", { class: "pill" }, record.finish_reason)));
}

// Everything the ledger has on it, in a sentence or two.
function story(record) {
  const said = [`${whole(record.prompt_tokens)} prompt tokens, ${whole(record.output_tokens)} out`];
  for (const name of SOURCES) if (record.tokens_by_source[name]) said.push(`${whole(record.tokens_by_source[name])} ${name}`);
  if (record.miss_reason) said.push(`no more because: ${words(record.miss_reason)}`);
  if (record.queued_s != null) said.push(`waited ${seconds(record.queued_s)}`);
  if (record.loaded_bytes) said.push(`${bytes(record.loaded_bytes)} loaded`);
  const { load } = record;
  if (load) said.push(`below the device: ${words(load.choice)}${load.load_s == null ? "" : `, load ${seconds(load.load_s)} against ${seconds(load.recompute_s)}`}, waited ${seconds(load.waited_s)}`);
  return said.join(" · ");
}

const row = (tag, texts) => h("tr", {}, ...texts.map((text, i) => h(tag, { class: i > 2 && i < 5 ? "num" : false, scope: "col" }, text)));

