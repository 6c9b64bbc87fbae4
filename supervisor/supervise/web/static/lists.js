"use strict";
// All runs: what needs a person first. Several runs beside each other.

const COMPARED = 6;

async function runsPage() {
  crumbs(h("span", {}, "runs"));
  document.title = "runs · supervise";
  // A run that cannot be read has its problem, and nothing else.
  const read = async () => {
    const answer = await json("runs");
    return { ...answer, runs: answer.runs.map((r) => ({ tags: [], curve: {}, rollbacks: [], needs: answer.needs.filter((need) => need.run === r.run), ...r })) };
  };
  let list = await read();
  const picked = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => {
    const query = new URLSearchParams([...picked].map((run, i) => ["abcdef"[i], run]));
    location.href = `${UP}compare/?${query}`;
  } }, "compare");
  const filter = h("input", { type: "search", placeholder: "filter: name, state, policy, tag", "aria-label": "filter runs",
    value: shown.get("q") || "", oninput: () => draw() });
  const needs = h("div");
  const body = h("div", { class: "card scroll", tabindex: 0, role: "group", "aria-label": "runs" });
  const count = h("h1", {});
  MAIN.replaceChildren(needs, h("div", { class: "bar" }, count, h("span", { class: "grow" }), filter, compare), body);
  let [sort, down] = [shown.get("sort") || "age", shown.get("up") === null];

  function pick(run, on) {
    if (on) picked.add(run);
    else picked.delete(run);
    compare.disabled = picked.size < 2 || picked.size > COMPARED;
    compare.textContent = picked.size ? `compare ${picked.size}` : "compare";
  }

  function draw() {
    remember({ q: filter.value, sort: sort === "age" ? null : sort, up: down ? null : 1 });
    needs.replaceChildren(list.needs.length ? h("section", { class: "card verdict busy" }, h("h2", {}, "Needs you"),
      h("ul", { class: "needs brief" }, list.needs.map((need) => needed(need, true)))) : h("p", { class: "calm" }, "✓ No run needs you."));
    const sought = filter.value.toLowerCase().split(/\s+/);
    const text = (r) => [r.run, r.state, r.verdict, r.policy, r.mode, r.host, r.note, ...r.tags, r.gravest?.severity].join(" ").toLowerCase();
    const rows = list.runs.filter((r) => sought.every((word) => text(r).includes(word)));
    count.textContent = rows.length === list.runs.length ? plural(rows.length, "run") : `${rows.length} of ${plural(list.runs.length, "run")}`;
    const value = SORTS[sort] || SORTS.age;
    rows.sort((a, b) => (value(a) < value(b) ? 1 : value(a) > value(b) ? -1 : 0) * (down ? 1 : -1));
    const hosts = new Set(list.runs.map((r) => r.host).filter(Boolean));
    const none = list.runs.length ? h("p", { class: "calm" }, "No run matches the filter.") : noRuns(list.directory);
    body.replaceChildren(rows.length ? runTable(rows, { picked, pick, sort, down, by, hosts }) : none);
    MAIN.dataset.ready = "curves";
    return MAIN;
  }

  function by(name) {
    [sort, down] = [name, sort === name ? !down : true];
    draw();
  }
  draw();
  keys(null);
  live(`read ${new Date().toTimeString().slice(0, 8)}`, true);
  setInterval(async () => {
    if (document.hidden) return;
    try {
      list = await read();
      keepFocus(MAIN, draw);
      live(`read ${new Date().toTimeString().slice(0, 8)}`, true);
    } catch {
      live("no connection");
    }
  }, 5000);
}

const noRuns = (directory) => h("div", {}, h("p", {}, `There is no run in ${directory} yet. This starts one:`),
  command("supervise -p nano -- python train.py"));

const SORTS = {
  __proto__: null,
  run: (r) => r.run,
  state: (r) => r.state,
  step: (r) => r.step ?? -1,
  loss: (r) => r.loss ?? -Infinity,
  incident: (r) => (r.gravest ? -Number(r.gravest.severity.slice(3)) : -9),
  age: (r) => r.created || "",
};

function runTable(rows, { picked, pick, sort, down, by, hosts }) {
  const order = (name, text) => h("button", { type: "button", class: "order", onclick: () => by(name) }, text,
    h("span", { "aria-hidden": "true" }, sort === name ? (down ? " ↓" : " ↑") : ""));
  const head = [["", "", h("span", { class: "hidden" }, "compare")], ["run", ""], ["state", ""], ["step", "n"], ["loss", "n"],
    ["curve", "", "curve of the loss"], ["incident", ""], ["protection", "", "can go back"], ["age", "n"]];
  const columns = head.map(([name, align, label]) => h("th", { scope: "col", class: align,
    "aria-sort": sort === name ? (down ? "descending" : "ascending") : null }, label || order(name, name)));
  const row = (r) => {
    const tick = h("input", { type: "checkbox", "aria-label": `compare ${r.run}`, checked: picked.has(r.run),
      onchange: (event) => pick(r.run, event.target.checked) });
    const steps = r.curve.steps;
    const span = steps?.at(-1) - steps?.[0] || 1;
    const marks = r.rollbacks.map((step) => (step - steps?.[0]) / span).filter((x) => x >= 0 && x <= 1);
    const cells = [tick,
      [h("a", { href: `${UP}${runPath(r.run)}/` }, h("b", {}, r.run)), hosts.size > 1 && [" ", h("small", {}, r.host || "")],
        r.tags.map((tag) => [" ", chip(tag)]), r.note && [" ", h("small", { class: "note" }, r.note)]],
      r.problem ? h("span", { class: "bad" }, r.problem) : [chip(r.state, r.ending ? endTone(r.ending, r.gravest?.unsettled) : r.needs.length && r.state === "running" ? "busy" : TONES[r.state] || "bad"), " ", stateText(r)],
      [r.step == null || r.step < 0 ? "–" : number(r.step), r.planned_steps ? h("small", {}, ` of ${number(r.planned_steps)}`) : "",
        r.state === "running" && r.eta_s != null ? [" ", h("small", {}, `${duration(r.eta_s)} left`)] : ""],
      h("span", { class: r.loss === "NaN" && "bad" }, number(r.loss)), sparkline(r.curve.loss, marks), gravest(r), canGoBack(r), [age(r.created)]];
    return h("tr", {}, cells.map((cell, i) => h("td", { class: head[i][1], "data-of": i > 2 ? head[i][2] || head[i][0] : "" }, cell)));
  };
  return h("table", { class: "runs" }, h("thead", {}, h("tr", {}, columns)), h("tbody", {}, rows.map(row)));
}

function stateText(r) {
  const text = r.ending ? troubles(r)[0] : liveVerdict(r.needs, r.verdict); // the others are under "Needs you"
  return text && text !== r.state && h("small", { class: "clamped", title: text }, text);
}

function gravest(r) {
  if (!r.gravest) return null;
  const { id, severity: name, headline: text, status, title, unsettled } = r.gravest;
  return [severity(name), " ", h("a", { class: "clamped", title: text, href: `${UP}${runPath(r.run)}/incident/${id}/` }, title || text || id),
    " ", h("small", {}, `${unsettled ? UNRESOLVED : status}${r.incidents > 1 ? `, one of ${r.incidents}` : ""}`)];
}

// Of a live run what can be done to it; of an ended one what is left to begin from.
function canGoBack(r) {
  if (r.ending) return h("small", { title: r.ending.checkpoint?.path, class: r.ending.checkpoint ? "" : "bad" }, lastGood(r.ending),
    r.ending.suspect && h("span", { class: "clamped" }, ` · ${r.ending.suspect}`));
  const able = (name) => /^(yes|exact|armed|from)/.test(r.protection?.[name] || "");
  const ways = ["rollback", "relaunch"].filter((name) => r.protection?.[name]);
  if (!ways.length) return h("span", { class: "dim" }, "–");
  return ways.map((name) => h("small", { class: able(name) ? "good" : "", title: r.protection[name] }, `${able(name) ? "✓" : "·"} ${name} `));
}

async function comparePage() {
  const runs = [..."abcdef"].map((key) => shown.get(key)).filter(Boolean);
  const title = runs.join(", ");
  crumbs(h("b", {}, "compare"));
  document.title = `${title} · supervise`;
  const [answer, documents] = await Promise.all([
    json(`compare?${new URLSearchParams(runs.map((run, i) => ["abcdef"[i], run]))}`),
    Promise.all(runs.map((run) => builtFacts(run)))]);
  const abouts = documents.map((run) => run.metrics);
  const drawn = runs.filter((_, i) => Object.keys(abouts[i]).length); // one without a journal has no curves
  const bare = runs.filter((run) => !drawn.includes(run));
  const [own = {}, ...rest] = abouts.filter((about) => Object.keys(about).length);
  const boards = Object.values(documents[runs.indexOf(drawn[0])]?.boards || {}).flat();
  const about = Object.fromEntries([...new Set([...boards, ...Object.keys(own)])]
    .filter((name) => own[name] && rest.every((other) => other[name])).map((name) => [name, own[name]]));
  const isUnlike = answer.differs.some((d) => d.group === "command" && /batch|seq|accum|block/.test(d.name));
  const axis = shown.get("x") || (isUnlike && about.tokens_seen ? "tokens" : "step"); // then steps are unlike
  const view = new View(drawn, { axis, smooth: shown.get("smooth"), window: windowShown() });
  const area = h("div");
  const others = h("button", { type: "button", onclick: () => search(view, about, area).then(() => view.load()) },
    `all ${Object.keys(about).length} metrics`);
  const heads = h("thead", {}, h("tr", {}, h("td", {}), documents.map((r, i) => h("th", { scope: "col" },
    drawn.includes(runs[i]) && h("i", { class: `line run${drawn.indexOf(runs[i]) + 1}` }), h("a", { href: `${UP}${runPath(r.run)}/` }, runs[i])))));
  const row = (label, cells) => h("tr", {}, h("th", { scope: "row" }, label), cells.map((cell, i) => h("td", { "data-of": runs[i] }, cell)));
  const worst = ({ run, incidents: all }) => {
    const [w] = [...all].reverse().sort((a, b) => (a.severity < b.severity ? -1 : a.severity > b.severity ? 1 : 0));
    return w ? [severity(w.severity), " ", h("a", { href: `${UP}${runPath(run)}/incident/${w.id}/` }, w.title), " ", h("small", {}, outcome(w))] : "none";
  };
  const done = ({ actions }) => actions.map((a) => a.sentence).filter(Boolean).map((text) => h("div", {}, text));
  const twin = (r, i) => (documents.findIndex(({ id }) => id === r.id) < i ? `the same run ${r.id}, or a copy of it` : "none");
  const measured = h("tbody"); // from the curves, once they are here
  const rate = (r, i) => [duration(r.steps_per_s && 1 / r.steps_per_s), i > 0 && r.steps_per_s > 0 && h("small", {}, ` ×${+(documents[0].steps_per_s / r.steps_per_s).toPrecision(2)}`)];
  const perStep = documents.map((r) => (r.steps_per_s > 0 && r.tokens_per_s ? number(Math.round(r.tokens_per_s / r.steps_per_s)) : "none"));
  const results = [["end", documents.map((r) => (r.ending ? [r.state, ...troubles(r)].join(", ") : r.verdict || r.state))], ["step", documents.map((r) => number(r.step))],
    ["worst incident", documents.map(worst)], ["actions", documents.map((r) => (done(r).length ? done(r) : "none"))],
    ["copy", documents.map(twin)], ["tokens per step", perStep],
    [["time of a step ", h("small", {}, "newest 64; other work on the machine counts")], documents.map(rate)]].filter(([, cells]) => cells.some((cell) => cell !== "none")).map(([label, cells]) => row(label, cells));
  const line = (d) => row(d.name.startsWith(d.group) ? d.name : [h("small", {}, `${d.group} `), d.name],
    Object.values(d.values).map((value) => (value === "–" && d.group === "command" ? "not set" : value)));
  const isPath = (d) => Object.values(d.values).every((value) => /^(–$|\/)/.test(value));
  const isPlace = (d) => d.group === "command" && /out|dir|log|save/.test(d.name) || isPath(d); // where it writes
  const isLong = (d) => d.group === d.name && d.group === "command" || /digest|sha256/.test(d.name) || d.group === "rules" || isPlace(d);
  const [long, short] = [answer.differs.filter(isLong), answer.differs.filter((d) => !isLong(d))];
  const part = (name) => h("tr", {}, h("th", { scope: "rowgroup", colspan: runs.length + 1, class: "part" }, name));
  const drills = documents.map((r) => r.drills.map((d) => `${d.fault} at step ${d.step}`).join(", ") || "no drill");
  const options = [...short.filter((d) => d.group === "command").map(line), ...(new Set(drills).size > 1 ? [row("drill", drills)] : [])];
  const environment = short.filter((d) => d.group !== "command").map(line);
  view.lines = drawn.flatMap((run, i) => documents[runs.indexOf(run)].incidents.map(({ attempt, step, t, severity: grave }) =>
    ({ attempt, step, t, source: i, tone: `run${i + 1}`, dash: [2, 2], text: `${grave} ${run}` })));
  MAIN.replaceChildren(...[h("h1", {}, title),
    h("section", { class: "card", "aria-label": "differences" }, h("table", { class: "compared stack" }, heads,
      h("tbody", {}, part(options.length ? "Options that differ" : "No option of the command differs"), options, part("Results")), measured,
      h("tbody", {}, results, environment.length > 0 && [part("What else differs"), environment])),
    long.length > 0 && h("details", {}, h("summary", {}, `Whole commands, paths, digests and policies: ${plural(long.length, "difference")}`),
      h("table", { class: "compared stack" }, h("tbody", {}, long.map(line)))),
    h("p", { class: "sub" }, `${plural(answer.same, "setting")} and fingerprints are the same.`)),
    (bare.length > 0 || !Object.keys(about).length) && h("p", { class: "card" }, bare.length ? `There are no curves of ${bare.join(", ")}: without a journal.` : "No metric is in all of them."),
    Object.keys(about).length > 0 && [h("div", { class: "bar" }, legend(view), h("span", { class: "grow" }), others, controls(view).filter(Boolean)),
      area]].flat().filter(Boolean));
  view.show(leading(Object.keys(about)).map((name, i) => new Chart(view, name, about[name], { wide: i === 0 })));
  area.replaceChildren(grid(view.charts, "curves"));
  MAIN.dataset.ready = "facts";
  keys(view);
  await view.load();
  const cells = (values) => runs.map((run) => values[drawn.indexOf(run)] ?? "–");
  measured.replaceChildren(...[["train_loss_raw", "train_loss"].find((name) => about[name]), about.learning_rate && "learning_rate"].filter(Boolean)
    .map((name) => row(...(name === "learning_rate" ? highest(view, name) : lastCommon(view, name, about[name])).map((part, i) => (i ? cells(part) : part)))));
}

// The loss of each run as the chart has it, at the last step that counts in all of them.
function lastCommon(view, name, about) {
  const paths = view.heads.map((head) => columns(head, name, view.axis).counts)
    .map((counts) => ({ counts, mean: averaged(counts, about, view.span()) || counts[3] }));
  const [first, ...others] = common(paths, view.span());
  const isApart = first?.x == null;
  const place = isApart ? "" : view.axis === "step" ? `at step ${number(first?.step)}` : view.axis === "time" ? `after ${duration(first?.x)}` : `at ${number(first?.x)} tokens`;
  const beside = (hit) => {
    const [by, limit] = [hit?.value - first?.value, 2 * Math.hypot(hit?.noise, first?.noise)];
    const isNoise = Math.abs(by) < limit;
    return [number(hit?.value), !isApart && isFinite(by) && h("small", { class: isNoise ? "dim" : "fact" },
      ` ${by < 0 ? "" : "+"}${number(+by.toPrecision(2))}${isNoise ? `, within the noise of ±${+limit.toPrecision(2)}` : ""}`)];
  };
  return [["loss ", h("small", {}, isApart ? "averaged, at the end of each" : `averaged, ${place}, the last of all`)], [number(first?.value), ...others.map(beside)]];
}

const highest = (view, name) => ["highest learning rate that counts", view.heads.map((head) => {
  const { counts } = columns(head, name, view.axis);
  const most = counts[2].reduce((a, b) => Math.max(a, b), -Infinity);
  return counts[2].length ? `${number(most)} at step ${number(counts[6][counts[2].indexOf(most)])}` : "–";
})];

function failed(error) {
  live("failed");
  MAIN.append(h("section", { class: "card verdict bad", role: "alert" }, h("h1", {}, "This cannot be shown"),
    h("p", {}, error.message), error.hint && command(error.hint)));
  if (!(error instanceof Refused)) throw error;
}

({ runs: runsPage, run: runPage, incident: incidentPage, compare: comparePage })[PAGE]().catch(failed);
