"use strict";
// What the server says: JSON, series as typed arrays without a copy, and what is new of a run.
// An exported page holds all of it itself.

const FROZEN = (() => {
  const block = document.getElementById("frozen");
  return block && JSON.parse(block.textContent);
})();
const PAGE = FROZEN ? "run" : document.body.dataset.page;
const PARTS = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
const RUN = FROZEN ? FROZEN.run.run : PARTS[PARTS.lastIndexOf("run") + 1];
const INCIDENT = PAGE === "incident" ? PARTS.at(-1) : null;
const UP = { runs: "./", run: "../../", incident: "../../../../", compare: "../" }[PAGE];

class Refused extends Error {
  constructor(status, { error, hint }) {
    super(error);
    Object.assign(this, { status, hint });
  }
}

const SLOW = 503; // a disk may be: the answer is ready at the next try, or the one after
const FIRST_MS = 5000; // for the first event, which is sent at once
const QUIET_MS = 40000; // for one more: the server says something every 15 s
const POLL_MS = 3000; // between two questions where no events come
const runPath = (run) => `run/${encodeURIComponent(run)}`;
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

async function request(path, tries = 3) {
  const answer = await fetch(`${UP}api/${path}`);
  if (answer.ok) return answer;
  if (answer.status === SLOW && tries > 1) return wait(1000).then(() => request(path, tries - 1));
  const failure = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  throw new Refused(answer.status, failure);
}

const json = async (path) => (await request(path)).json();
const facts = async (run) => (FROZEN ? FROZEN.run : json(runPath(run)));

// The facts of a run once its curves are built; `progress` gets their share until then.
async function builtFacts(run, progress = () => {}) {
  for (;;) {
    const answer = await facts(run);
    if (answer.building >= 1) return answer;
    progress(answer.building);
    await wait(500);
  }
}

const COLUMNS = { step: 1, time: 2, tokens: 3 }; // of the planes of x; 0 is the ordinal

async function series(run, names, query = {}) {
  if (FROZEN) {
    FROZEN.bytes ??= Uint8Array.from(atob(FROZEN.series), (c) => c.charCodeAt(0)).buffer;
    return decode(FROZEN.bytes);
  }
  const parts = new URLSearchParams(names.map((m) => ["m", m]));
  for (const [k, v] of Object.entries(query)) if (v != null) parts.set(k, v);
  const path = `${runPath(run)}/series?${parts}`;
  let answer = await request(path);
  while (answer.status === 202) { // the curves of a rank that was chosen are being built
    await wait(500);
    answer = await request(path);
  }
  return decode(await answer.arrayBuffer());
}

function decode(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  for (const stretch of head.stretches) {
    const k = stretch.n;
    stretch.x = [0, 1, 2, 3].map((i) => new Float64Array(buffer, at + 8 * i * k, k));
    at += 32 * k;
    stretch.y = {}; // metric -> min, max, mean, n
    for (const name of head.metrics) {
      stretch.y[name] = [0, 1, 2, 3].map((i) => new Float32Array(buffer, at + 4 * i * k, k));
      at += 16 * k;
    }
  }
  return head;
}

// The old answer with what is new after it; only its open end is replaced.
function extend(old, more) {
  const cut = old.next;
  const join = (a, n, b) => {
    const both = new a.constructor(n + b.length);
    both.set(a.subarray(0, n));
    both.set(b, n);
    return both;
  };
  more.stretches.forEach((fresh, i) => {
    const past = old.stretches[i];
    if (!past) return;
    const at = past.x[0].findIndex((ordinal) => ordinal >= cut);
    const n = at < 0 ? past.n : at;
    fresh.x = fresh.x.map((plane, j) => join(past.x[j], n, plane));
    for (const name of more.metrics) {
      fresh.y[name] = fresh.y[name].map((plane, j) => join(past.y[name][j], n, plane));
    }
    fresh.n += n;
  });
  return more;
}

// Hears what has changed of a run as long as the page is looked at; `take` gets it. Where no events
// come through, or no more, it is asked for, and the connection is made again now and then.
function listen(run, known, take) {
  let [version, record] = [known.version, known.decisions[0]?.record ?? -1];
  let [source, polls, late] = [null, null, null];
  const path = (place) => `${runPath(run)}${place}?version=${version}&record=${record}`;
  document.addEventListener("visibilitychange", open);
  open();

  function open() {
    clearTimeout(late);
    source?.close(); // of a hidden page: a browser opens few connections to a server
    if (document.hidden) return;
    source = new EventSource(`${UP}api/${path("/live")}`);
    source.onmessage = ({ data }) => {
      clearTimeout(late);
      clearInterval(polls);
      polls = null;
      late = setTimeout(poll, QUIET_MS);
      live("live", true);
      accept(JSON.parse(data));
    };
    source.onerror = poll;
    late = setTimeout(poll, FIRST_MS);
  }
  function poll() {
    clearTimeout(late);
    source.close();
    late = setTimeout(open, QUIET_MS);
    if (polls) return;
    live("no connection");
    polls = setInterval(async () => {
      if (document.hidden) return;
      try {
        accept(await json(path("")));
        if (polls) live("every 3 s", true);
      } catch (error) {
        live(error instanceof Refused ? error.message : "no connection");
      }
    }, POLL_MS);
  }
  function accept(changed) {
    if (changed.version <= version) return; // a sign of life, or an answer that was overtaken
    const decisions = changed.decisions.filter((d) => d.record > record);
    [version, record] = [changed.version, decisions[0]?.record ?? record];
    take({ ...changed, decisions });
  }
}

// What is shown, in the address: a link shows what I see.
const shown = new URLSearchParams(location.search);

function remember(values) {
  for (const [name, value] of Object.entries(values)) {
    if (value == null || value === "") shown.delete(name);
    else shown.set(name, value);
  }
  if (FROZEN) return;
  const query = shown.toString();
  history.replaceState(null, "", location.pathname + (query ? `?${query}` : ""));
}
