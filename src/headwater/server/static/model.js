// From answers of /stats to what is shown: rates are made of two answers, never asked for.

export const SOURCES = ["device", "host", "storage", "peer", "computed"];
export const HISTORY = 180;

export function isRestart(before, now) {
  return before.started_s !== now.started_s || now.uptime_s < before.uptime_s;
}

// What happened between two answers of one server.
export function between(before, now) {
  const dt = now.uptime_s - before.uptime_s;
  const rate = (get) => Math.max(0, get(now) - get(before)) / dt;
  const sources = Object.fromEntries(SOURCES.map((name) => [name, rate((s) => s.totals.prompt_tokens_by_source_total[name] ?? 0)]));
  const links = {};
  for (const name of Object.keys(now.cache.links)) {
    links[name] = rate((s) => s.cache.links[name]?.num_bytes ?? 0);
  }
  return {
    at: now.uptime_s,
    output: rate((s) => s.totals.generation_tokens_total),
    prompt: rate((s) => s.totals.prompt_tokens_total),
    ttft: quantiles(before.latencies.ttft, now.latencies.ttft),
    itl: quantiles(before.latencies.itl, now.latencies.itl),
    sources,
    links,
  };
}

// Median and 95th percentile of what was observed in between; null where nothing was.
function quantiles(before, now) {
  const counts = now.counts.map((n, i) => n - before.counts[i]);
  const total = counts.reduce((a, b) => a + b, 0);
  if (total <= 0) return null;
  return { p50: quantile(counts, total, now.bounds, 0.5), p95: quantile(counts, total, now.bounds, 0.95), mean: (now.sum_s - before.sum_s) / total };
}

function quantile(counts, total, bounds, q) {
  let left = q * total;
  for (let i = 0; i < counts.length; i += 1) {
    if (left <= counts[i] && counts[i] > 0) {
      const low = i ? bounds[i - 1] : 0;
      const high = i < bounds.length ? bounds[i] : bounds[bounds.length - 1];
      return low + (high - low) * (left / counts[i]);
    }
    left -= counts[i];
  }
  return bounds[bounds.length - 1];
}

export function hitShare(sources) {
  const total = SOURCES.reduce((sum, name) => sum + (sources[name] ?? 0), 0);
  return total > 0 ? 1 - (sources.computed ?? 0) / total : null;
}

// The sum of the last few points, so that shares and latencies of a quiet second do not flicker.
export function lately(history, get, count = 10) {
  return history.slice(-count).map(get).filter((value) => value != null);
}
