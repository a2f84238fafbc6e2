// The last ten minutes, as the server keeps them: points of /stats/history.

export const SOURCES = ["device", "host", "storage", "peer", "computed"];
const LATELY_S = 30, GAP_INTERVALS = 3.5;

// Reasons for which computed tokens were never in the cache. All other reasons are losses.
const NEW_TEXT = new Set(["never_seen", "too_short", "last_block"]);

let points = [];
export const time = { now: 0, span: 600, gap: 7 };

// What is asked of the server next: only points that are not here yet.
export const historyPath = () => `stats/history?after=${points.length ? points.at(-1).at.toFixed(6) : 0}`;

export function addHistory({ now_unix_s: now, interval_s: interval, span_s: span, points: newer }) {
  if (points.length && now < points.at(-1).at) points = [];
  const last = points.length ? points.at(-1).at : 0;
  for (const point of newer) if (point.unix_s > last) points.push({ ...point, at: point.unix_s });
  points = points.filter((point) => point.at >= now - span);
  Object.assign(time, { now, span, gap: interval * GAP_INTERVALS });
  return points;
}

export const allPoints = () => points;

// The newest point; null when the server has not sampled for some intervals.
export const newest = () => (points.length && time.now - points.at(-1).at < 2 * time.gap ? points.at(-1) : null);

// Tokens of the last half minute by source.
export function latelyBySource() {
  const sums = Object.fromEntries(SOURCES.map((name) => [name, 0]));
  for (const point of points) {
    if (time.now - point.at > LATELY_S) continue;
    for (const name of SOURCES) sums[name] += (point.rates.by_source[name] ?? 0) * point.elapsed_s;
  }
  return sums;
}

// Prompt tokens since the start by source. The prompts of a prefill instance are handed to it by decode
// instances, so its engine counts them and not its HTTP server.
export function promptSources({ role, totals, cache: { ledger } }) {
  if (role !== "prefill") return totals.prompt_tokens_by_source_total;
  return { ...ledger.found_tokens, computed: Math.max(0, ledger.query_tokens - sumOf(ledger.found_tokens)) };
}

export function hitShare(sources) {
  const total = SOURCES.reduce((sum, name) => sum + (sources[name] ?? 0), 0);
  return total > 0 ? 1 - (sources.computed ?? 0) / total : null;
}

// Amounts by reason as `{fresh, lost}`: new text, and tokens that were computed before.
export function splitReasons(reasons) {
  const fresh = {}, lost = {};
  for (const [reason, n] of Object.entries(reasons)) (NEW_TEXT.has(reason) ? fresh : lost)[reason] = n;
  return { fresh, lost };
}

export const sumOf = (amounts) => Object.values(amounts).reduce((sum, n) => sum + n, 0);
