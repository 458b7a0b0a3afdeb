// Chooses the page by the address, and draws it again when the server says that something changed.

import { ask, h, state } from "./dom.js";
import * as pages from "./pages.js";

const PAGES = {
  "": ["Overview", pages.overview], curves: ["Curves", pages.curves], steps: ["Steps", pages.steps], trajectories: ["Trajectories", pages.trajectories], groups: ["Groups", pages.groups],
  batches: ["Batches", pages.batches], jobs: ["Jobs", pages.jobs], pushes: ["Pushes", pages.pushes], events: ["Events", pages.eventsPage], trajectory: ["", pages.trajectory],
};
const AGAIN_MS = 1000;
const main = document.getElementById("main"), nav = document.getElementById("nav"), picker = document.getElementById("run"), health = document.getElementById("health"), live = document.getElementById("live");
let chosen = "", drawing = 0, drawn = "", stale = false, due = 0;

const go = (hash) => { if (location.hash === hash) draw(); else location.hash = hash; };

function place() {
  const [path, asked] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").map(decodeURIComponent), query: new URLSearchParams(asked ?? "") };
}

async function draw() {
  const mine = ++drawing, { parts, query } = place();
  const [title, page] = PAGES[parts[0]] ?? PAGES[""];
  const moved = drawn !== location.hash;
  if (moved) main.setAttribute("aria-busy", "true");
  nav.replaceChildren(...Object.entries(PAGES).filter(([, [name]]) => name).map(([key, [name]]) =>
    h("a", { href: `#/${key}`, "aria-current": key === parts[0] ? "page" : null }, name)));
  let content;
  try {
    const [told, runs] = await Promise.all([ask("/api/overview"), ask("/api/runs")]);
    const run = runs.some((one) => one.name === chosen) ? chosen : told.run?.name ?? "";
    picker.replaceChildren(...runs.map((one) => h("option", { selected: one.name === run }, one.name)));
    health.replaceChildren(state(told.health));
    content = await page({ told, runs, run, parts, query, go });
  } catch (error) {
    if (error instanceof TypeError && !moved) return; // the server is away, as `live` says: what was seen last stays
    content = h("div", { class: "problem", role: "alert" }, error.message);
  }
  if (mine !== drawing) return;
  const busy = !moved && main.contains(document.activeElement) && ["INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (busy) return; // somebody types: the next change draws it
  const focused = moved ? -1 : [...main.querySelectorAll("a, button")].indexOf(document.activeElement);
  main.replaceChildren(content);
  main.setAttribute("aria-busy", "false");
  document.title = `${title || `Trajectory ${parts[1]}`} · artd`;
  drawn = location.hash;
  if (moved) main.focus({ preventScroll: true });
  else if (focused >= 0) main.querySelectorAll("a, button")[focused]?.focus({ preventScroll: true });
}

// At most once a second, and not while nobody looks.
function refresh() {
  stale = true;
  if (due || document.hidden) return;
  due = setTimeout(async () => { due = 0; stale = false; await draw(); if (stale) refresh(); }, AGAIN_MS);
}

function listen() {
  const source = new EventSource("/api/live");
  source.addEventListener("change", refresh);
  source.onopen = () => { live.textContent = ""; refresh(); };
  source.onerror = () => {
    live.textContent = "not live";
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

picker.addEventListener("change", () => { chosen = picker.value; draw(); });
addEventListener("hashchange", draw);
addEventListener("visibilitychange", () => { if (stale) refresh(); });
listen();
draw();
