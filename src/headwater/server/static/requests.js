// Requests and hand-offs: tables of one answer.

import { byId, bytes, h, seconds, setText, share, whole, words } from "./dom.js";
import { SOURCES } from "./model.js";

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
  // The whole row opens it: when a narrow page is scrolled to the right, the name is out of sight.
  return h("tr", { title: story(record), class: "opens", onclick: () => { chosen = record.request_id; setText("recent-detail", story(record)); } },
    h("td", { class: "name" }, h("button", { type: "button", class: "plain", "data-request": record.request_id }, record.request_id)),
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

