// What every page has: asking with a key, saying how it is, the theme.

import { byId, setText } from "./dom.js";

const EVERY_MS = 1000, PATIENCE_MS = 6000;
const KEY = "headwater-key", THEME = "headwater-theme";

export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (answer.status === 401) throw new DOMException("a key is needed", "NotAllowedError");
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `status ${answer.status}`);
  return answer.json();
}

export function say(state, text) {
  byId("state").dataset.state = state;
  setText("state-text", text);
}

// Calls `look` once a second for ever; a server that goes is waited for, `lost` is told.
export function watch(look, lost = () => {}) {
  let hasLooked = false;
  const turn = async () => {
    if (document.visibilityState === "visible" || !hasLooked) {
      try {
        await look();
        hasLooked = true;
        byId("key-form").hidden = true;
      } catch (error) {
        if (error.name === "NotAllowedError") return askForKey();
        say("lost", error.name === "TypeError" || error.name === "TimeoutError" ? "waiting for the server" : error.message);
        lost();
      }
    }
    setTimeout(turn, EVERY_MS);
  };
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value);
    byId("key").value = "";
    turn();
  });
  turn();
}

// Marks boxes that can be scrolled to the right, so that their edge fades and a hint is shown.
export function hintScroll() {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.toggle("more-right", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
  }
}
document.addEventListener("scroll", (event) => { if (event.target.classList?.contains("scroll")) hintScroll(); }, { capture: true, passive: true });

function askForKey() {
  say("lost", "a key is needed");
  if (sessionStorage.getItem(KEY)) setText("key-error", "That key does not fit.");
  sessionStorage.removeItem(KEY);
  byId("key-form").hidden = false;
  byId("key").focus();
}

const themes = ["auto", "light", "dark"];
function showTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  setText("theme", `Theme: ${name}`);
  localStorage.setItem(THEME, name);
}
byId("theme").addEventListener("click", () => showTheme(themes[(themes.indexOf(localStorage.getItem(THEME)) + 1) % 3]));
showTheme(themes.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
