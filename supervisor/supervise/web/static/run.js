"use strict";
// The page of a run: verdict, boards of charts, lanes on the same axis, rules, ranks, decisions.

const BOARDS = { icu: "Vital signs", efficiency: "Efficiency", data: "Data", quality: "Quality" };
// Without a prototype: what a run says may be named like a method of one.
const PHASES = { __proto__: null, launching: ["starting", "no step was made yet"], warming: ["learning", "it learns what is normal"],
  nominal: ["normal", "nothing is wrong"], suspect: ["suspect", "a rule fires"], acting: ["acting", "it acts on the job"],
  probation: ["checking", "did the action help?"], holding: ["held", "automatic actions are off until somebody releases them"],
  halted: ["ended", "the job has ended"] };
const TONES = { __proto__: null, running: "good", finished: "good", stopped: "busy", unsupervised: "busy" }; // all else is bad
// Of a rule: its glyph and what it says, the most urgent first.
const RULES = { __proto__: null, firing: ["!", "firing"], flapping: ["~", "firing on and off"],
  BREACH: ["▲", "past a limit, not for long enough to fire"], blind: ["✕", "cannot judge"], OK: ["✓", "within limits"],
  UNKNOWN: ["?", "too few samples yet"], inactive: ["·", "metrics not reported"] };
const QUIET = ["OK", "UNKNOWN", "inactive"];
const ICONS = { __proto__: null, intent: "◆", commit: "✓", abort: "✕", verify: "◎", incident: "●", rule: "▲", suppressed: "–",
  operator: "☝", approval: "☝", request: "?", policy: "⟳", policy_load: "⟳", launch: "▶", run_start: "▶", end: "■", run_end: "■",
  rebaseline: "≈", schedule: "◷", checkpoint: "□", sampling: "≈", state: "→", withdraw: "↩" };
const BOARD = 14; // charts of a board at most
const STEPS = 64; // newest ones, over which a loss is compared
const NEWEST = 20; // decisions, before the rest is opened
const UNRESOLVED = "unresolved at the end";
const CURVES_MS = 2000; // between two looks at the curves of a run that goes on
const FOLDED = 6; // charts of a board on a phone, before the button

async function runPage() {
  crumbs(h("b", {}, RUN));
  document.title = `${RUN} · supervise`;
  const run = await facts(RUN);
  const sections = new Sections(run);
  const view = new View([RUN], { axis: shown.get("x"), smooth: shown.get("smooth"),
    rank: shown.get("rank"), window: windowShown() });
  const progress = h("div", { class: "building", hidden: true });
  share(view, run);
  const area = h("div", { id: "board" });
  const bar = h("div", { class: "bar" });
  MAIN.replaceChildren(
    sections.add(verdict),
    h("div", { class: "columns" },
      sections.add(incidents),
      h("div", { class: "main" }, bar, lanes(view, run), progress, area, FROZEN && leftOut(FROZEN.left_out), sections.add(decisions)),
      h("aside", { class: "side", "aria-label": "supervision" },
        sections.add(rules),
        sections.add(ranks),
        sections.add(checkpoints),
        sections.add(operate),
        sections.add(about))),
    FROZEN ? frozenIncidents() : "");
  MAIN.dataset.ready = "facts";
  if (run.building < 1) {
    progress.hidden = false;
    Object.assign(run, await builtFacts(RUN, (share) => progress.replaceChildren(
      h("p", {}, `Reading the journal for the curves, ${Math.round(share * 100)} %. Once for each run.`),
      h("progress", { value: share, max: 1, "aria-label": "reading the journal" }))));
    progress.hidden = true;
    share(view, run);
    sections.update(run);
  }
  const redraw = boards(view, run, bar, area);
  if (FROZEN) live(`saved ${FROZEN.made.slice(0, 16).replace("T", " ")}`);
  else if (run.state === "running" || run.state === "unsupervised") follow(view, run, sections, redraw);
  else live(run.state);
}

function windowShown() {
  const [lo, hi] = [shown.get("lo"), shown.get("hi")].map((v) => (v === null ? NaN : Number(v)));
  return lo < hi ? [lo, hi] : null;
}

// What charts and lanes need of the facts.
function share(view, run) {
  view.incidents = run.incidents;
  view.attempts = run.attempts;
  view.lines = run.actions.filter((a) => a.outcome === "done" && (a.restored || a.verb === "relaunch")).map((a) => {
    const moment = { incident: a.incident, attempt: a.attempt, step: a.restored?.from_step ?? a.step, t: a.end_t };
    return a.restored ? { ...moment, tone: "good", dash: [4, 3], kind: "savepoint restored", text: `step ${moment.step}: savepoint of step ${a.restored.step} restored` }
      : { ...moment, tone: "run2", dash: [7, 3], kind: "job started again", text: "job started again" };
  });
}

// Parts of the page that are drawn again when a fact of the run has changed that they show.
class Sections {
  constructor(run) {
    this.run = run;
    this.parts = [];
  }

  add(draw) {
    const part = { draw, keys: new Set() };
    part.run = new Proxy(this.run, { get: (run, key) => part.keys.add(key) && run[key] });
    part.element = draw(part.run);
    this.parts.push(part);
    return part.element;
  }

  update(changed) {
    for (const part of this.parts) {
      if (!Object.keys(changed).some((key) => part.keys.has(key))) continue;
      const { anchorNode, isCollapsed } = getSelection();
      if (!isCollapsed && part.element.contains(anchorNode)) continue; // somebody copies a text of it
      keepFocus(part.element, () => {
        const open = [...part.element.querySelectorAll("details[open]")].map((d) => d.dataset.key);
        const fresh = part.draw(part.run);
        for (const d of fresh.querySelectorAll("details")) d.open = open.includes(d.dataset.key);
        part.element.replaceWith(fresh);
        return (part.element = fresh);
      });
    }
  }
}

function follow(view, run, sections, redraw) {
  const size = ({ metrics, frames }) => Object.keys(metrics).length + Object.keys(frames).length;
  let drawn = size(run); // metrics and ranks on the boards: the first step of a job brings them
  let [last, waits] = [0, null];
  const curves = () => {
    [last, waits] = [performance.now(), null];
    view.load(true).catch(() => live("no connection"));
  };
  listen(RUN, run, ({ decisions, ...changed }) => {
    for (const decision of [...decisions].reverse()) {
      const ordered = /^(commit|abort|in doubt)$/.test(decision.kind) && run.decisions.find((d) => d.kind === "intent");
      if (ordered) ordered.is_chief = false; // its outcome says it
      run.decisions = [decision, ...run.decisions].slice(0, 200);
    }
    Object.assign(run, changed);
    share(view, run);
    sections.update(decisions.length ? { ...changed, decisions } : changed);
    view.moved();
    if (size(run) !== drawn && !$("#board").contains(document.activeElement)) {
      drawn = size(run);
      redraw();
    }
    if (changed.frames) waits ??= setTimeout(curves, Math.max(0, CURVES_MS - (performance.now() - last)));
  });
}

// The colour of a run: by its end, or by what is open.
const endTone = ({ kind }, isUnsettled) => (kind === "finished" && isUnsettled ? "busy" : TONES[kind] || "bad");

function tone(run) {
  if (run.ending) return endTone(run.ending, run.incidents.some((i) => i.unsettled));
  const open = run.incidents.filter((i) => i.phase !== "closed");
  if (open.some((i) => i.severity !== "SEV2") || run.phase === "holding") return "bad";
  return open.length || run.needs.length ? "busy" : TONES[run.state] || "bad";
}

// What a run left behind where that is not as it should be, the gravest first.
const troubles = ({ ending }) => ending.facts.filter((fact) => fact.kind !== "finished").map((fact) => fact.text);
// What a live run waits for, in the words of a title: the command is under it.
const WAITS = { __proto__: null, protection_off: "the protection is off", approval: "waits for your answer", held: "automatic actions are off",
  paused: "the job is paused" };
const ALONE = { __proto__: null, lost: "ended without its supervisor", unsupervised: "runs without a supervisor" };

const liveVerdict = (needs, verdict) => WAITS[needs.find((need) => need.kind in WAITS)?.kind] || verdict;

// The title of a run, and the line under it.
function headline(run) {
  const { ending, state, verdict } = run;
  if (!ending) return [liveVerdict(run.needs, verdict) || "no status yet", ""];
  if (ALONE[ending.kind]) return [ALONE[ending.kind], ending.text];
  const [first, ...rest] = troubles(run);
  return [!first ? state : ending.stopped_by ? first : `${state}: ${first}`, rest.join(" · ")];
}

const lastGood = ({ checkpoint }) => (checkpoint ? `step ${number(checkpoint.step)} (${checkpoint.id})` : "none");

function verdict(run) {
  const several = run.ranks.length > 1;
  const facts = [
    ["step", run.step < 0 ? "before the first" : !run.planned_steps ? number(run.step)
      : run.step + 1 === run.planned_steps ? `${number(run.step)}, the last of ${number(run.planned_steps)}` : `${number(run.step)} of ${number(run.planned_steps)}`],
    [`${run.loss_metric === "train_loss" ? "loss per token" : "loss"}${several ? `, ${run.loss_metric === "job_loss" ? "mean over ranks" : `rank ${run.lead ?? 0}`}` : ""}`, run.loss],
    [`tokens/s${several ? run.tokens_of === "rank" ? " a rank" : " of all ranks" : ""}, mean of 64 steps`, run.tokens_per_s && Math.round(run.tokens_per_s)],
    ["steps/s, mean of 64 steps", run.tokens_per_s ? null : run.steps_per_s],
    ["left", run.state === "running" && run.eta_s != null ? duration(run.eta_s) : null],
    ["rollbacks and restarts", run.attempt || null],
    ["last good checkpoint", run.ending && lastGood(run.ending)],
    ["supervisor", run.ending ? null : (PHASES[run.phase] || [run.phase]).filter(Boolean).join(": ")],
    ["policy", `${run.policy} (${run.mode})`],
    ["started", run.created && `${age(run.created)} ago`],
  ].filter(([, value]) => value != null && value !== "");
  const [title, more] = headline(run);
  const same = run.needs.find((need) => need.kind === (run.ending?.kind || "incident")); // the title says it
  const others = run.needs.filter((need) => need !== same);
  const next = run.ending?.command || same?.command;
  return h("section", { class: `card verdict ${tone(run)}`, "aria-label": "verdict" },
    h("p", { class: "tags" }, run.building < 1 ? chip("curves are being read") : "", run.tags.map((tag) => chip(tag)),
      run.drills.map((drill) => chip(`drill: ${drill.fault} at step ${number(drill.step)}`, "busy")),
      h("span", { class: "sub" }, run.argv?.map(quoted).join(" "))),
    h("h1", {}, title, h("small", {}, [same?.title, run.incidents.length ? `${plural(run.incidents.length, "incident")}, ${standing(run)}` : ["no incident", firing(run)].filter(Boolean).join(", ")].filter(Boolean).join(" · "))),
    more && h("p", {}, more),
    run.ending?.suspect && h("p", {}, run.ending.suspect),
    slowRank(run),
    run.problem && h("p", { class: "bad" }, run.problem),
    same?.steps.length ? advised(same.steps) : next && command(next),
    others.length > 0 && h("ul", { class: "needs" }, others.map((need) => needed(need, false))),
    h("dl", { class: "facts" }, facts.map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", { class: value === "NaN" && "bad" }, number(value))))),
    run.cache && h("p", { class: "sub" }, run.cache));
}

// A thing that waits for a person: sentence, deadline, command.
function needed({ run, text, command: line, severity: grave, incident, title, steps, left_s }, named) {
  const home = `${UP}${runPath(run)}/`;
  const shown = named ? steps.filter((step) => step.command).slice(0, 1) : steps; // its page has all
  return h("li", {},
    h("div", { title: named ? text : null }, grave && severity(grave), " ",
      named && [h("a", { href: home }, h("b", {}, run)), " "],
      left_s != null && h("b", { class: "left" }, `${duration(left_s)} left `),
      title && [h("a", { href: `${home}incident/${incident}/` }, title), ": "], h("span", {}, text)),
    !shown.length ? line && command(line) : named ? command(shown[0].command) : advised(shown),
    steps.length > shown.length && h("small", {}, shown.length > 0 && `${shown[0].text}; `, h("a", { href: home }, "what else can be done")));
}

function standing({ incidents: all }) {
  const open = all.filter((i) => i.phase !== "closed").length;
  const unsettled = all.filter((i) => i.unsettled).length;
  if (open) return `${open} open`;
  return unsettled ? `${unsettled === all.length ? "" : `${unsettled} `}${UNRESOLVED}` : "all closed";
}

// Rules that fire, where no incident says so.
function firing({ rule_states: states, muted, ending }) {
  const count = Object.keys(states).filter((rule) => /^(firing|flapping)$/.test(states[rule]) && !muted[rule]).length;
  return count ? `${plural(count, "rule")} firing${ending ? " at the end" : ""}` : "";
}

function slowRank({ slow, own_s: own, incidents: all, ending }) {
  if (slow?.rank == null) return null;
  const known = all.findLast((i) => i.slow_since != null && (!i.end || i.end.step >= slow.since))?.slow_since;
  const others = Object.keys(own).filter((rank) => rank !== String(slow.rank)).map((rank) => own[rank]).sort((a, b) => a - b);
  const times = others.length && own[slow.rank] ? `: ${duration(own[slow.rank])} of each step are its own, ${duration(others[others.length >> 1])} of ${others.length > 1 ? "the other ranks" : `rank ${slow.rank ? 0 : 1}`}` : "";
  return h("p", {}, h("b", { class: "bad" }, `Rank ${slow.rank} ${ending ? "was" : "is"} slow`),
    ` since ${known == null ? "about " : ""}step ${number(known ?? slow.since)} in ${slow.part}${times}.`);
}

const outcome = ({ state, unsettled, end_text: text }) => (unsettled ? [UNRESOLVED, text].filter(Boolean).join(": ") : text || state.toLowerCase());

function incidents(run) {
  const count = run.incidents.length;
  const item = (incident) => {
    const [name, to] = [incident.title || incident.id, `incident/${incident.id}/`];
    const raised = incident.raised.map((r) => h("small", {}, `raised to ${r.severity} at step ${r.step}`));
    const done = run.actions.filter((a) => a.incident === incident.id).map((a) => a.sentence).filter(Boolean);
    return h("li", {}, severity(incident.severity), " ",
      h("a", { href: FROZEN ? `#${incident.id}` : to }, name),
      h("small", {}, `step ${number(incident.step)}` +
        (incident.end ? ` to ${number(incident.end.step)}` : "") + ` · ${outcome(incident)}`),
      h("small", {}, `did: ${done.join(" · ") || "nothing to the job"}`), raised);
  };
  return h("section", { class: "card incidents" },
    h("h2", {}, count ? plural(count, "incident") : "No incident", h("small", {}, " ", count ? standing(run) : firing(run))),
    count > 0 && h("ul", { class: "list" }, [...run.incidents].reverse().map(item)));
}

function rules(run) {
  const about = Object.fromEntries(run.rules.map((rule) => [rule.id, rule]));
  const order = Object.keys(RULES);
  const all = Object.entries(run.rule_states).sort(([, a], [, b]) => order.indexOf(a) - order.indexOf(b));
  const line = (isWhole) => ([rule, state]) => h("li", {}, h("i", { class: `rule ${state}`, "aria-hidden": "true" }, RULES[state]?.[0] || "?"), " ",
    h("b", {}, about[rule]?.title || rule), " ",
    run.silenced[rule] ? `silenced by ${run.silenced[rule]}` : RULES[state]?.[1] || state, run.ending && " at the end", run.muted[rule] && `, muted by ${run.muted[rule].replace(/^(inhibit|host|silence):/, "").replace(":", " ")}`,
    h("small", {}, rule, about[rule] && [` · ${about[rule].severity}${about[rule].runbook ? `, runs ${about[rule].runbook}` : ""}`,
      isWhole && h("code", {}, ` · ${about[rule].when}`)]));
  const counts = QUIET.map((state) => [all.filter(([, own]) => own === state).length, RULES[state][1]]).filter(([n]) => n);
  const busy = all.filter(([rule, state]) => !QUIET.includes(state) || run.silenced[rule]);
  return h("section", { class: "card" }, h("h2", {}, "Rules ", h("small", {}, busy.length ? run.ending ? "as at the end" : "" : "none fires")),
    busy.length > 0 && h("ul", { class: "list" }, busy.map(line(false))),
    h("p", { class: "sub" }, counts.map(([n, text]) => `${n} ${text}`).join(" · ")),
    h("details", { "data-key": "rules", class: "rules" }, h("summary", {}, `All ${all.length} rules`), h("ul", { class: "list" }, all.map(line(true)))));
}

function ranks(run) {
  const isEven = run.ranks.every((r) => r.lag === run.ranks[0].lag);
  const { own_s: own, slow, ending } = run;
  const isMeasured = Object.keys(own).length > 0;
  const rows = run.ranks.map((r) => [r.rank === slow?.rank ? [`${r.rank} `, chip("slow", "bad")] : `${r.rank}`, number(r.lag || 0), ...(isMeasured ? [duration(own[r.rank])] : []),
    ...(ending ? [] : [words(r.phase ?? "–"), duration(r.silent_s)])]);
  const notes = run.ranks.flatMap((r) => r.notes.map((note) => h("li", {}, `rank ${r.rank}: ${note}`)));
  const head = [["rank"], ["behind", "n", "steps behind the first"],
    ...(isMeasured ? [["alone", "n", "time of a step outside of the backward, where ranks wait for the slowest"]] : []),
    ...(ending ? [] : [["doing"], ["quiet", "n", "since its last sign of life"]])];
  const dear = Math.max(...run.ranks.map((r) => r.overhead || 0));
  const most = rows.length < 2 ? "" : `${isEven ? "all at the same step" : "the one most behind first"}${!slow ? "" : slow.rank == null ? "; none is slow" : `; rank ${slow.rank} is slow`}`;
  return h("section", { class: `card ${rows.length > 1 ? "first" : ""}`, hidden: rows.length < (ending ? 2 : 1) },
    h("h2", {}, plural(rows.length, "rank"), " ", h("small", {}, most)), table(head, rows, "steps"),
    dear > 0 && h("p", { class: "sub" }, `measuring takes ${+(dear * 100).toPrecision(2)} % of a step`),
    notes.length > 0 && h("details", { "data-key": "notes" }, h("summary", {}, "What the probes say"), h("ul", { class: "list" }, notes)));
}

const CHECKED = { __proto__: null, verified: ["■", "good", "verified"], bad: ["✕", "bad", "damaged"], found: ["□", "", "not checked"],
  unverified: ["□", "", "cannot be checked"], vanished: ["□", "", "gone"] };
const checked = ({ state, suspect }) => chip(`${(CHECKED[state] || ["□"])[0]} ${CHECKED[state]?.[2] || state}${suspect && state === "verified" ? ", suspect" : ""}`, suspect ? "" : CHECKED[state]?.[1]);

function checkpoints(run) {
  const item = (c) => h("li", {},
    checked(c), ` step ${number(c.step)} `,
    h("small", { title: c.path }, c.name, c.pinned ? " · never removed" : "", c.present === false ? " · gone" : "", c.suspect && ` · ${c.suspect}`),
    c.problems.length > 0 && h("small", {}, c.problems[0], c.problems.length > 1 ? ` · and ${c.problems.length - 1} more like this` : ""));
  const rows = [...run.checkpoints].reverse();
  return h("section", { class: "card", hidden: !rows.length },
    h("h2", {}, plural(rows.length, "checkpoint"), h("small", {}, run.actions.some((a) => a.restored) ? " files of the job; a rollback restores a savepoint in memory" : "")), h("ul", { class: "list" }, rows.slice(0, 5).map(item)),
    rows.length > 5 && h("details", { "data-key": "more" }, h("summary", {}, `${rows.length - 5} older`),
      h("ul", { class: "list" }, rows.slice(5, 100).map(item))));
}

function decisions(run) {
  const item = (d) => h("li", {},
    h("time", { datetime: d.wall, title: d.wall }, (d.wall || "").slice(11, 19)),
    h("span", { "aria-hidden": "true" }, ICONS[d.kind] || "·"),
    h("span", {}, d.severity ? [severity(d.severity), " "] : "", d.text, h("small", {}, ` ${words(d.kind)}${d.step < 0 ? "" : `, step ${number(d.step)}`}`)));
  const chief = run.decisions.filter((d) => d.is_chief);
  const list = (rows) => h("ul", { class: "list log" }, rows.map(item));
  return h("section", { class: "card" }, h("h2", {}, "Decisions ", h("small", {}, "newest first, UTC")), list(chief.slice(0, NEWEST)),
    run.decisions.length > 0 && h("details", { "data-key": "all" }, h("summary", {}, `The newest ${plural(run.decisions.length, "record")}`), list(run.decisions)));
}

function pairs(rows) {
  return h("dl", { class: "pairs" }, rows.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
}

// Commands to the supervisor: to copy, or where `supervise web --write` allows it to send.
function operate(run) {
  const open = run.incidents.find((i) => i.phase !== "closed");
  const request = run.needs.map((need) => need.request).find(Boolean);
  const firing = Object.keys(run.rule_states).find((rule) => run.rule_states[rule] === "firing");
  const [path, held] = [quoted(run.path), run.phase === "holding"];
  const orders = [
    request && ["approve", `--sha ${quoted(request.sha)} ${path} ${quoted(request.id)}`, request],
    request && ["deny", `${path} ${quoted(request.id)}`, { id: request.id }],
    open && ["ack", `${path} ${quoted(open.id)}`, { incident: open.id }],
    held && ["release", path, {}],
    firing && ["silence", `${path} ${quoted(firing)}`, { rule: firing, for: 1000 }],
    ["pause", path, {}], ["resume", path, {}], ["savepoint", path, {}], ["stop", path, { requeue: false }],
  ].filter(Boolean);
  const item = ([name, rest, args]) => h("li", {}, run.operator
    ? h("button", { type: "button", onclick: () => order(name, args, run.operator) }, `${name} …`) : command(`supervise ${name} ${rest}`));
  return h("section", { class: "card", hidden: FROZEN || run.state !== "running" }, h("h2", {}, "Operate"),
    h("details", { "data-key": "operate" }, h("summary", {}, run.operator ? "Send a command" : "Commands to copy"),
      h("ul", { class: run.operator ? "orders" : "list" }, orders.map(item))));
}

let written = ""; // the second token: in memory only, asked for once

const QUESTIONS = {
  pause: "Pause the job at its next step boundary?",
  resume: "Continue the paused job?",
  ack: "Acknowledge the open incident? Its reminders stop.",
  silence: "Silence this rule? It neither acts nor notifies meanwhile.",
  approve: "Approve this request? Its runbook runs with these arguments.",
  deny: "Deny this request? The incident is held until it is released.",
  release: "End the hold? The policy may act again.",
  savepoint: "Save the training state in memory, for a later rollback?",
  stop: "End the job? It is interrupted at a step boundary.",
};

function order(name, args, operator) {
  const given = Object.entries(args).map(([k, v]) => `${k} ${v}`).join(", ");
  send(QUESTIONS[name], name, h("p", { class: "sub" }, `${given} Recorded as sent by ${operator}.`),
    () => ["POST", "command", { command: name, args }], (answer) => [answer.outcome, answer.text, ...answer.records.map((r) => r.text)].filter(Boolean).join(": "));
}

function annotate(run) {
  const tags = h("input", { value: run.tags.join(" ") });
  const note = h("input", { value: run.note });
  const fields = [h("label", {}, "tags, with spaces between them ", tags), h("label", {}, "note ", note)];
  send("Tags and note", "save", fields,
    () => ["PUT", "note", { tags: tags.value.split(/\s+/).filter(Boolean), note: note.value }], () => "saved");
}

// A dialog that sends to the run; `made`: method, path and content, `text`: of the answer.
function send(title, name, fields, made, text) {
  const token = h("input", { type: "password", autocomplete: "off", required: true, value: written });
  const answered = h("p", { class: "sub", role: "status" });
  const button = h("button", {}, name);
  const box = h("dialog", { "aria-label": title, onclose: () => box.remove() }, h("form", { onsubmit }, h("h2", {}, title), fields,
    h("label", {}, "second token, as supervise web printed it ", token), answered,
    h("p", { class: "bar" }, button, h("button", { type: "button", onclick: () => box.close() }, "close"))));
  async function onsubmit(event) {
    event.preventDefault();
    written = token.value;
    button.disabled = true;
    answered.textContent = "sent, waiting for the answer";
    const headers = { "Content-Type": "application/json", "X-Supervise": "1", "X-Supervise-Write": written };
    const [method, path, content] = made();
    const answer = await fetch(`${UP}api/${runPath(RUN)}/${path}`, { method, headers, body: JSON.stringify(content) })
      .then((r) => r.json()).catch((error) => ({ error: error.message }));
    answered.textContent = answer.error || text(answer);
    if (answer.hint) answered.after(command(answer.hint));
    button.disabled = !answer.error;
  }
  document.body.append(box);
  box.showModal();
}

function about(run) {
  const rows = [...run.facts, ["host", run.host], ["run", run.id], ["directory", run.path],
    ["working directory", run.cwd], ["tags", run.tags.join(" ")], ["note", run.note], ["policy", `${run.policy} ${(run.policy_digest || "").slice(0, 18)}`]];
  return h("section", { class: "card" }, h("h2", {}, "About"),
    h("details", { "data-key": "about" }, h("summary", {}, "Status, command and where it runs"),
      pairs(rows.filter(([, text]) => text)), run.operator &&
        h("button", { type: "button", onclick: () => annotate(run) }, "tags and note …"), run.argv && command(run.argv.map(quoted).join(" ")),
      !FROZEN && h("p", {}, h("a", { href: "export.html", download: `${RUN}.html` }, "Save this page as one file"), " · ",
        h("a", { href: "record.html" }, "Stability record"))));
}

// ── boards ──────────────────────────────────────────────────────────────────────────────────────

// Returns what draws them again, as the facts of the run are then.
function boards(view, run, bar, area) {
  const names = { ...BOARDS, all: "All" };
  let tabs;
  const show = (id) => {
    const about = run.metrics;
    const frames = Object.keys(run.frames);
    if (!frames.length) view.full = { min: 0, max: Math.max(1, run.step) };
    remember({ board: id === "icu" ? null : id });
    const present = leading((run.boards[id] || []).filter((name) => about[name]));
    if (id === "all") search(view, about, area);
    else {
      view.show(present.map((name, i) => new Chart(view, name, about[name], { wide: i === 0 })));
      area.replaceChildren(grid(view.charts, names[id]), id === "quality" ? evaluations(run, about) : "",
        frames.length ? absent(run.missing[id] || [], present.length) : noCurves());
    }
    view.moved();
    return view.load().catch(failed);
  };
  const draw = () => {
    const asked = shown.get("board");
    const first = Object.hasOwn(names, asked) ? asked : "icu";
    tabs = choice("boards", Object.entries(names), first, show);
    bar.replaceChildren(tabs, h("span", { class: "grow" }),
      ...controls(view, Object.keys(run.frames).sort((a, b) => a - b)).filter(Boolean));
    show(first);
  };
  const jumps = Object.keys(names).map((id) => () => tabs.select(id));
  jumps.search = () => tabs.select("all").then(() => $("input[type=search]").focus());
  keys(view, jumps);
  draw();
  return draw;
}

// A metric of a part (`grad_global_norm.embedding`) is under All where that of the whole is here,
// and so is another form of the same loss.
function leading(names) {
  return names.filter((name) => !(name.includes(".") && names.includes(name.split(".")[0])) &&
    !(name === "train_loss" && names.includes("train_loss_raw"))).slice(0, BOARD);
}

function grid(charts, label) {
  const fold = innerWidth < 600 && charts.length > FOLDED;
  const section = h("section", { class: `grid${fold ? " folded" : ""}`, "aria-label": label }, charts.map((c) => c.element));
  const more = h("button", { type: "button", class: "more", onclick: () => {
    section.classList.remove("folded");
    more.remove();
  } }, `${charts.length - FOLDED} more charts`);
  return [section, fold ? more : ""].reduce((box, part) => (box.append(part), box), h("div"));
}

function absent(names, present) {
  if (!names.length) return "";
  return h("p", { class: "sub absent" }, present ? "Not reported by this job: " : "This job reports nothing of this board: ",
    `${names.map(words).join(", ")}. `, h("code", {}, "supervise doctor"), " says why.");
}

const leftOut = (names) => names.length > 0 && h("details", { class: "sub" },
  h("summary", {}, `Not in this file: ${plural(names.length, "metric")} of the run`), names.join(", "));

const noCurves = () => h("p", { class: "card" }, "There are no curves: this run has no journal. It was removed (",
  h("code", {}, "supervise gc"), "), or no step was made yet. The rest is from the audit log.");

function search(view, about, area) {
  const input = h("input", { type: "search", placeholder: "name or meaning", "aria-label": "search metrics",
    value: shown.get("q") || "", oninput: () => {
      clearTimeout(input.timer);
      input.timer = setTimeout(() => find().then(() => view.load()), 200);
    } });
  const count = h("span", { class: "sub", role: "status" });
  const place = h("div");
  const find = async () => {
    const sought = input.value.trim().toLowerCase();
    remember({ q: sought });
    const hits = Object.entries(about).filter(([id, m]) => `${id} ${m.name} ${m.means}`.toLowerCase().includes(sought));
    count.textContent = `${hits.length} of ${Object.keys(about).length} metrics${hits.length > 24 ? ", the first 24" : ""}`;
    view.show(hits.slice(0, 24).map(([id, m]) => new Chart(view, id, m)));
    place.replaceChildren(grid(view.charts, "metrics"));
  };
  area.replaceChildren(h("div", { class: "bar" }, input, count), place);
  return find();
}

// Checkpoints with their evaluations, a column each.
function evaluations(run, about) {
  const rows = run.checkpoints.filter((c) => Object.keys(c.values || {}).length);
  if (!rows.length) return "";
  const names = [...new Set(rows.flatMap((c) => Object.keys(c.values)))];
  const head = [["checkpoint"], ["step", "n"], ["state"], ...names.map((n) => [about[n]?.name || words(n), "n"])];
  const body = rows.map((c) => [c.name, number(c.step), checked(c),
    ...names.map((n) => number(c.values[n]))]);
  return card("Checkpoints and their evaluations", "", h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "evaluations" }, table(head, body)));
}

// ── lanes ───────────────────────────────────────────────────────────────────────────────────────

function lanes(view, run) {
  const element = h("div", { class: "lanes", role: "group", "aria-label": "what happened, on the axis of the charts" });
  const draw = () => {
    const { min, max } = view.range();
    const percent = (x) => ((x - min) / (max - min)) * 100;
    const visible = (from, to = from) => to >= min && from <= max;
    const put = (child, from, to) => {
      const left = Math.max(percent(from), 0);
      child.style.left = `${left}%`;
      if (to != null) child.style.width = `${Math.max(Math.min(percent(to), 100) - left, 0.3)}%`;
      return child;
    };
    // A text that has room between two places, else none of it.
    const fits = (text, from, to) => ((percent(Math.min(to, max)) - percent(Math.max(from, min))) / 100) *
      (element.clientWidth - 115) > text.length * 6.6 + 8 ? text : "";
    const lane = (name, children) => children.length > 0 &&
      h("div", { class: "lane" }, h("span", {}, name), h("div", {}, children));
    const mark = (thing, glyph, text, tone = "") => visible(view.at(thing)) &&
      put(h("i", { class: `mark ${tone}`, role: "img", "aria-label": text, title: text }, glyph), view.at(thing));
    const phases = run.phases.map((p, i) => {
      const end = run.phases[i + 1] ? view.at(run.phases[i + 1]) : view.full.max;
      const from = view.at(p);
      const [name, title] = PHASES[p.name] || [p.name, ""];
      return end > from && visible(from, end) &&
        put(h("i", { class: `phase ${p.name}`, title: `${name} from step ${p.step}: ${title}` }, fits(name, from, end)), from, end);
    });
    const incidents = run.incidents.flatMap((incident) => view.ranges(incident).map(([from, to]) => {
      const text = `${incident.severity} ${incident.title || incident.id}`;
      const at = { class: `incident ${incident.severity.toLowerCase()}`, title: text,
        href: FROZEN ? `#${incident.id}` : `incident/${incident.id}/` };
      return visible(from, to) && put(h("a", at, fits(text, from, to) || fits(incident.severity, from, to)), from, to);
    }));
    const raised = run.incidents.flatMap((i) => i.raised.map((r) => mark(r, "▴", `${i.id} raised to ${r.severity} at step ${r.step}`, "bad")));
    const actions = run.actions.filter((a) => a.verb !== "snapshot").map((a) => {
      const text = `step ${a.step}: ${words(a.verb)} ${a.text}, ${a.outcome || "under way"}`;
      return mark(a.restored ? { ...a, step: a.restored.from_step } : a, a.restored || a.verb === "relaunch" ? "⟲" : "◆", text, "action");
    });
    const saved = run.checkpoints.filter((c) => c.step != null).map((c) => {
      const t = c.saved && run.t0 ? Date.parse(c.saved) / 1000 - run.t0 : NaN;
      const [glyph, tone] = CHECKED[c.state] || ["□", ""];
      const text = [CHECKED[c.state]?.[2] || c.state, c.suspect].filter(Boolean).join(", ");
      return mark({ attempt: c.attempt, step: c.step, t }, glyph, `checkpoint of step ${c.step}: ${text}`, c.suspect ? "" : tone);
    });
    const events = run.events.map((e) => mark(e, ICONS[e.kind] || "•", `step ${e.step}, ${e.kind}: ${e.text}`));
    const some = (children) => children.filter(Boolean);
    element.replaceChildren(...[lane("state", some(phases)), lane("incidents", some([...incidents, ...raised])), lane("actions", some(actions)),
      lane("checkpoints", some(saved)), lane("events", some(events)), key].filter(Boolean));
  };
  const key = legend(view);
  view.changed.push(draw);
  return element;
}
