// One function a page: (context) => Promise<Node>. context: {run, runs, parts, query, go}.

import { gantt, keys, lines } from "./charts.js";
import { ask, bytes, h, number, query, span, state, table, time } from "./dom.js";

const encode = encodeURIComponent;
const link = (href, ...text) => h("a", { href }, ...text);
const show = (id) => link(`#/trajectory/${id}`, id);

export async function overview({ told }) {
  const flow = Object.entries(told.groups).flatMap(([split, states]) =>
    Object.entries(states).filter(([, one]) => split === "train" || one.groups).map(([name, one]) => h("li", {},
      h("b", {}, number(one.trajectories)), `${split === "train" ? "" : "eval "}${name}`, h("small", {}, ` in ${number(one.groups)} groups`))));
  const run = told.run;
  return h("div", {},
    h("h1", {}, told.doing),
    told.problems.map((problem) => h("div", { class: "problem", role: "alert" }, h("div", {}, problem.what), h("small", {}, `Next: ${problem.next}`))),
    told.problems.length ? null : h("p", { class: "faint" }, `Next: ${told.next}`),
    told.warnings.map((text) => h("p", { class: "warn" }, text)),
    run ? h("p", {}, `Run ${run.name} is `, state(run.state), run.reason ? ` (${run.reason})` : "", `, step ${run.step}, serves ${run.served < 0 ? "nothing" : `step ${run.served}`}. `,
      `Free disk: ${bytes(told.disk_free)}.`) : null,
    h("h2", {}, "Trajectories by the state of their group"), h("ul", { class: "flow" }, flow.length ? flow : h("li", {}, "none yet")),
    h("h2", {}, "Workers"), table("processes that the daemon manages", [
      ["worker", (row) => row.name], ["state", (row) => state(row.state)], ["alive", (row) => (row.alive ? "yes" : "no")], ["pid", (row) => row.pid ?? "", true],
      ["restarts", (row) => row.restarts, true], ["serves", (row) => row.serving.join(", ")], ["since", (row) => time(row.since)], ["error", (row) => row.error],
    ], told.workers),
    h("h2", {}, "Jobs under way"), table("running, quarantined and queued", [
      ["job", (row) => row.id, true], ["kind", (row) => row.kind], ["step", (row) => row.step, true], ["state", (row) => state(row.state)], ["attempts", (row) => row.attempts, true],
      ["worker", (row) => row.worker ?? ""], ["waits for", (row) => row.waiting || row.error || ""],
    ], told.active_jobs),
    h("h2", {}, "Latest events"), events(told.events));
}

const events = (rows) => table("newest first", [
  ["time", (row) => time(row.at)], ["run", (row) => row.run], ["event", (row) => row.kind], ["of", (row) => row.ref],
  ["data", (row) => (Object.keys(row.data).length ? JSON.stringify(row.data) : "")],
], rows);

const FIRST = ["reward_mean", "sampled_reward_mean", "eval_reward_mean", "reward_std", "loss", "kl_k3", "entropy", "ratio_mean", "ratio_p95", "ratio_p99", "clipped_fraction",
  "staleness_mean", "staleness_max", "mismatch_mae", "answer_tokens_mean", "answer_tokens_max", "truncated_fraction", "grad_norm", "tokens_per_s"];
const rank = (name) => { const at = FIRST.indexOf(name); return at < 0 ? FIRST.length : at; };

export async function curves({ run, runs, query: asked, go }) {
  const chosen = [...new Set([run, ...asked.getAll("with")])].filter((name) => runs.some((one) => one.name === name)).slice(0, 6);
  if (!chosen.length) return h("p", {}, "There is no run yet.");
  const found = await Promise.all(chosen.map((name) => ask(`/api/runs/${encode(name)}/metrics`)));
  const names = [...new Set(found.flatMap((one) => one.known))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const wanted = asked.get("match") ?? "";
  const charts = names.filter((name) => name.includes(wanted)).map((name) =>
    lines(name, found.filter((one) => one.metrics[name]).map((one) => ({ name: one.run, xs: one.steps, ys: one.metrics[name] }))));
  const phases = [...new Set(found.flatMap((one) => Object.keys(one.seconds)))].filter((name) => name.includes(wanted));
  const timed = phases.map((name) => lines(`seconds: ${name}`, found.filter((one) => one.seconds[name]).map((one) => ({ name: one.run, xs: one.steps, ys: one.seconds[name] }))));
  const to = (fields) => go(`#/curves${query({ match: wanted, with: chosen.slice(1), ...fields })}`);
  const others = runs.map((one) => one.name).filter((name) => !chosen.includes(name));
  return h("div", {}, h("h1", {}, `Curves of ${chosen.join(", ")}`),
    h("div", { class: "bar" },
      h("label", {}, "Metrics with ", h("input", { type: "search", value: wanted, onchange: (event) => to({ match: event.target.value }) })),
      others.length ? h("label", {}, "Compare with ", h("select", { onchange: (event) => to({ with: [...chosen.slice(1), event.target.value] }) },
        h("option", { value: "" }, "…"), others.map((name) => h("option", {}, name)))) : null,
      chosen.length > 1 ? h("button", { onclick: () => to({ with: [] }) }, "Only this run") : null),
    chosen.length > 1 ? keys(chosen) : null,
    charts.length ? null : h("p", { class: "faint" }, "No step has been trained yet."),
    h("div", { class: "cards" }, charts, timed));
}

export async function steps({ run, told }) {
  if (!run) return h("p", {}, "There is no run yet.");
  const bars = await ask(`/api/runs/${encode(run)}/timeline?limit=20`);
  return h("div", {}, h("h1", {}, `The newest steps of ${run}`), gantt(bars, told.at),
    h("h2", {}, "The same as a table"), table("oldest first", [
      ["step", (bar) => bar.step, true], ["what", (bar) => bar.kind], ["by", (bar) => bar.lane], ["from", (bar) => time(bar.start)],
      ["took", (bar) => (bar.end ? span(bar.end - bar.start) : "goes on")], ["state", (bar) => state(bar.state)], ["is", (bar) => bar.ref],
    ], bars));
}

const pager = (rows, limit, go, fields, place) => h("div", { class: "bar" },
  fields.before ? h("button", { onclick: () => go(`#/${place}${query({ ...fields, before: "" })}`) }, "Newest") : null,
  rows.length === limit ? h("button", { onclick: () => go(`#/${place}${query({ ...fields, before: rows.at(-1).id })}`) }, "Older") : null);

const choice = (label, values, value, change) => h("label", {}, `${label} `, h("select", { onchange: (event) => change(event.target.value) },
  h("option", { value: "" }, "all"), values.map((one) => h("option", { selected: one === value }, one))));

export async function trajectories({ run, query: asked, go }) {
  const fields = { state: asked.get("state") ?? "", split: asked.get("split") ?? "", before: asked.get("before") ?? "" };
  const rows = await ask(`/api/tables/trajectories${query({ ...fields, run, limit: 50 })}`);
  const to = (changed) => go(`#/trajectories${query({ ...fields, before: "", ...changed })}`);
  return h("div", {}, h("h1", {}, `Trajectories of ${run || "all runs"}`),
    h("div", { class: "bar" }, choice("State", ["queued", "packed", "trained", "discarded"], fields.state, (value) => to({ state: value })),
      choice("Split", ["train", "eval"], fields.split, (value) => to({ split: value }))),
    table("newest first; a number opens the conversation", [
      ["id", (row) => show(row.id), true], ["group", (row) => row.group], ["split", (row) => row.split], ["state", (row) => state(row.state)], ["reward", (row) => number(row.reward), true],
      ["tokens", (row) => number(row.tokens), true], ["epochs", (row) => (row.epoch_min === null ? "" : row.epoch_min === row.epoch_max ? row.epoch_min : `${row.epoch_min}–${row.epoch_max}`), true],
      ["submitted", (row) => time(row.created)], ["reason", (row) => row.reason],
    ], rows), pager(rows, 50, go, fields, "trajectories"));
}

const depth = (logprob) => (logprob > -0.1 ? 0 : logprob > -0.7 ? 1 : logprob > -2 ? 2 : logprob > -5 ? 3 : 4);
const tip = (token) => `token ${token.id}` + (token.turn < 0 ? ", context" : `, turn ${token.turn}, logprob ${number(token.logprob)}, policy epoch ${token.epoch ?? "unknown"}`);

export async function trajectory({ parts, query: asked, go }) {
  const row = await ask(`/api/trajectories/${encode(parts[1])}`);
  const tokens = asked.get("view") === "tokens";
  const facts = [["group", row.group], ["reward", number(row.reward)], ["advantage", number(row.advantage)], ["state", row.state + (row.reason ? ` (${row.reason})` : "")], ["tokens", number(row.tokens)], ["submitted", time(row.created)]];
  return h("div", {}, h("h1", {}, `Trajectory ${row.id} of ${row.run}`),
    h("p", {}, facts.filter(([, value]) => value !== "").map(([name, value], i) => [i ? " · " : "", h("span", { class: "faint" }, `${name} `), value])),
    row.problem ? h("p", { class: "warn" }, row.problem) : null,
    h("div", { class: "bar" }, h("button", { onclick: () => go(`#/trajectory/${row.id}${tokens ? "" : "?view=tokens"}`) }, tokens ? "Show messages" : "Show tokens"),
      tokens ? h("span", { class: "tokens" }, "log-probability ", ["above −0.1", "−0.7", "−2", "−5", "below"].map((text, i) => [h("span", { class: `t${i}` }, ` ${text} `), " "])) : null),
    row.sequences.map((one, i) => h("section", {}, row.sequences.length > 1 ? h("h2", {}, `Sequence ${i + 1} of ${row.sequences.length}`) : null,
      tokens ? h("div", { class: "message tokens" }, one.tokens.map((token) => h("span", { class: token.turn < 0 ? "context" : `t${depth(token.logprob)}`, title: tip(token) }, token.text || `⟨${token.id}⟩`)))
        : one.messages.map(message))));
}

const message = (one) => h("article", { class: one.turn >= 0 ? "message sampled" : "message" },
  h("small", {}, one.role, one.turn >= 0 ? `, sampled in turn ${one.turn}` : ""),
  one.thinking ? h("details", {}, h("summary", {}, "thinking"), h("pre", {}, one.thinking)) : null,
  one.text ? h("pre", {}, one.text) : null,
  one.tool_calls.map((call) => h("pre", {}, `${call.name}(${call.arguments})`)));

const TABLES = {
  jobs: [["job", (row) => row.id, true], ["kind", (row) => row.kind], ["step", (row) => row.step, true], ["state", (row) => state(row.state)], ["attempts", (row) => row.attempts, true], ["worker", (row) => row.worker ?? ""],
    ["took", (row) => (row.started && row.ended ? span(row.ended - row.started) : "")], ["tokens", (row) => number(row.batch_tokens), true], ["ended", (row) => time(row.ended)], ["error", (row) => row.error || row.waiting || ""]],
  batches: [["batch", (row) => row.id, true], ["step", (row) => row.step, true], ["state", (row) => state(row.state)], ["trajectories", (row) => number(row.trajectories), true], ["tokens", (row) => number(row.tokens), true],
    ["rows filled", (row) => `${Math.round(row.fill * 100)} %`, true], ["routes replayed", (row) => (row.covered === null ? "" : `${Math.round((100 * row.covered) / row.tokens)} %`), true], ["packed", (row) => time(row.created)]],
  pushes: [["push", (row) => row.id, true], ["step", (row) => row.step, true], ["engine", (row) => row.engine], ["state", (row) => state(row.state)], ["by", (row) => row.transfer ?? row.source], ["took", (row) => (row.started && row.ended ? span(row.ended - row.started) : "")],
    ["largest difference", (row) => number(row.max_abs), true], ["phases", (row) => Object.entries(row.seconds ?? {}).map(([name, value]) => `${name} ${number(value)} s`).join(", ")], ["error", (row) => row.error ?? ""]],
  groups: [["group", (row) => row.name], ["split", (row) => row.split], ["state", (row) => state(row.state)], ["size", (row) => row.size ?? "", true], ["opened", (row) => time(row.created)], ["reason", (row) => row.reason]],
};

const tablePage = (what, title) => async ({ run, query: asked, go }) => {
  const before = asked.get("before") ?? "";
  const rows = await ask(`/api/tables/${what}${query({ run, before, limit: 50 })}`);
  return h("div", {}, h("h1", {}, `${title} of ${run || "all runs"}`), table("newest first", TABLES[what], rows), pager(rows, 50, go, { before }, what));
};

export const jobs = tablePage("jobs", "Jobs"), batches = tablePage("batches", "Batches"), pushes = tablePage("pushes", "Pushes"), groups = tablePage("groups", "Groups");

export async function eventsPage({ query: asked, go }) {
  const before = asked.get("before") ?? "";
  const rows = await ask(`/api/tables/events${query({ before, limit: 100 })}`);
  return h("div", {}, h("h1", {}, "Events"), events(rows), pager(rows, 100, go, { before }, "events"));
}
