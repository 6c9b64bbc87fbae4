"use strict";
// Charts that share a window: raw behind smoothed, the undone dashed, incidents and what was done.

const RATE = 80; // a metric with fewer points shows each as a dot
const [ROWS, LABEL] = [4, 14]; // of texts over a wide chart, and their height
const CONSTANT = 1e-3; // a change by less, as a share of the value, is drawn as none
const SKEWED = 20; // a largest value over so many times the median has a log scale

// One metric of one run: [x, min, max, mean, n, steps so far, step] of what counts and of each undone
// path, [index, xs] where the line of what counts has a gap, and all `points` for the reader.
function columns(head, name, axis) {
  const path = () => [[], [], [], [], [], [], []];
  const counts = path();
  const [undone, broken, gaps] = [[], [], []];
  let skipped = 0; // steps that do not lie on the path that counts
  let holes = []; // x since the newest point that counts
  for (const { n, x, y, last: end, undone: ranges } of head.stretches) {
    if (!y[name]) continue;
    const [min, max, mean, found] = y[name];
    let lane = null;
    let joins = counts[0].length > 0;
    for (let i = 0; i < n; i++) {
      const at = x[COLUMNS[axis]][i];
      const step = x[1][i];
      const last = i + 1 < n ? x[1][i + 1] - 1 : end; // of the bucket: one that is undone in part does not count
      const gone = ranges.some(([from, to]) => last >= from && step <= to);
      if (found[i] < 0) broken.push({ x: at, step, value: NaN, n: 1, gone });
      if (gone || found[i] < 0) holes.push(at);
      if (found[i] === 0 || isNaN(mean[i]) || isNaN(at)) continue;
      if (gone && !lane) {
        lane = path();
        undone.push(lane);
        const left = counts.map((column) => column.at(-1)); // where it left the path that counts
        if (left[0] < at) lane.forEach((column, k) => column.push(k === 6 ? null : left[k]));
      } else if (!gone) {
        if (joins) skipped = step - counts[5].at(-1) - 1;
        holes = [...new Set(holes)].filter((hole) => counts[0].at(-1) < hole && hole < at).sort((a, b) => a - b);
        if (holes.length) gaps.push([counts[0].length, holes]);
        [lane, joins, holes] = [null, false, []];
      }
      const to = gone ? lane : counts;
      [at, min[i], max[i], mean[i], Math.floor(Math.abs(found[i])), step - skipped, step].forEach(
        (value, k) => to[k].push(value));
    }
  }
  const read = (gone) => (path) => path[6].map((step, i) => ({ x: path[0][i], step, value: path[3][i], n: path[4][i], gone }));
  const points = [...undone.flatMap(read(true)), ...read(false)(counts), ...broken].filter((p) => p.step != null);
  points.sort((a, b) => a.x - b.x || b.gone - a.gone);
  return { counts, undone: undone.map(sorted), broken: broken.map((p) => p.x), gaps, points };
}

function sorted(path) {
  const order = path[0].map((_, i) => i).sort((a, b) => path[0][a] - path[0][b]);
  return path.map((column) => order.map((i) => column[i]));
}

// A moving average by distance in steps, not by points.
function smoothed([, , , mean, found, step], span) {
  const decay = Math.exp(-1 / span);
  let [sum, weight] = [0, 0];
  return mean.map((value, i) => {
    const fade = decay ** Math.max(1, i ? step[i] - step[i - 1] : found[i]);
    sum = sum * fade + value * (1 - fade);
    weight = weight * fade + (1 - fade);
    return weight ? sum / weight : value;
  });
}

// Of runs beside each other: what each has, with its noise, at the last place that counts in all,
// or at its own end, without x, where one begins behind the end of another.
function common(paths, span) {
  const [begin, end] = [Math.max(...paths.map(({ counts }) => counts[0][0] ?? -Infinity)), Math.min(...paths.map(({ counts }) => counts[0].at(-1) ?? Infinity))];
  return paths.map(({ counts, mean }) => {
    const i = begin > end ? counts[0].length - 1 : counts[0].findLastIndex((x) => x <= end);
    if (i < 0) return null;
    const [width, from] = [Math.max(span, 3), Math.max(0, i - STEPS)];
    const rest = smoothed(counts, width).slice(from, i + 1).map((y, k) => counts[3][from + k] - y);
    const share = rest.length * (mean === counts[3] ? 1 : 2 * width);
    return { x: begin > end ? null : end, step: counts[6][i], value: mean[i], noise: Math.hypot(...rest) / Math.sqrt(share) };
  });
}

const averaged = (counts, about, span) => (span > 1 && about.smooth && counts[0].length >= RATE ? smoothed(counts, span) : null);

class Chart {
  constructor(view, name, about, { wide = false, limit = null } = {}) {
    Object.assign(this, { view, name, about, limit });
    const button = (text, title, onclick) => {
      const label = `${text === "log" ? "log: " : ""}${title} of ${about.name}`;
      return h("button", { type: "button", title, "aria-label": label, onclick }, text);
    };
    this.value = h("output", { class: "value" });
    this.log = about.log ? true : null; // null: as the values are
    this.logs = button("log", "logarithmic y", () => {
      this.log = !this.isLog;
      this.draw(true);
    });
    const widen = button("⤢", "full width", () => {
      const isWide = this.element.classList.toggle("wide");
      [widen.textContent, widen.title] = isWide ? ["⤡", "one column"] : ["⤢", "full width"];
      this.draw(true);
    });
    if (wide) [widen.textContent, widen.title] = ["⤡", "one column"];
    const unit = /^(1|loss|)$/.test(about.unit ?? "") ? "" : h("small", {}, about.unit);
    this.box = h("div", { class: "canvas", role: "img", "aria-label": about.name });
    const caption = [h("b", { title: about.means || null }, about.name), unit, this.value, this.logs, widen];
    this.element = h("figure", { class: `chart${wide ? " wide" : ""}` },
      h("figcaption", {}, caption), this.box);
  }

  set(heads) {
    this.heads = heads;
    if (this.isSeen) this.draw();
    else this.isStale = true;
  }

  seen() {
    this.isSeen = true;
    if (!this.isStale) return;
    this.isStale = false;
    this.draw();
    this.view.moved(); // the legend has what is drawn
  }

  // Series of uPlot: for each path min and max without a line (their band is filled), raw, smoothed.
  draw(anew = false) {
    if (!this.heads || !this.isSeen) return;
    const { view } = this;
    const [tables, lines, bands] = [[], [{}], []];
    const hidden = { stroke: null, points: { show: false } };
    [this.broken, this.paths] = [[], []];
    this.heads.forEach((head, i) => {
      const { counts, undone, broken, gaps, points } = columns(head, this.name, view.axis);
      const stroke = colour(`run${i + 1}`);
      const raw = head.bucket === 1;
      const dots = counts[0].length > 0 && counts[0].length < RATE;
      const smooth = averaged(counts, this.about, view.span());
      [this.isSmooth, this.isDotted] = [Boolean(smooth), dots && raw];
      const k = lines.length;
      this.broken.push(...broken);
      this.paths.push({ counts, undone, points, bucket: head.bucket, mean: smooth || counts[3] });
      const table = [...counts.slice(0, 4), smooth || counts[3]].map((column) => [...column]);
      for (const [j, xs] of gaps.reverse()) table.forEach((column, i) => column.splice(j, 0, ...(i ? xs.map(() => null) : xs)));
      tables.push(table);
      lines.push(hidden, hidden,
        { stroke: smooth ? `${stroke}66` : null, width: 1, points: { show: false } },
        { stroke, width: smooth ? 2 : 1.4, points: { show: dots, size: 4.5, fill: stroke } });
      if (!raw) bands.push({ series: [k + 1, k], fill: `${stroke}30` });
      for (const lane of undone) {
        const at = lines.length;
        const gone = colour("gone");
        tables.push(lane.slice(0, 4));
        lines.push(hidden, hidden,
          { stroke: gone, width: 1.4, dash: [5, 3], points: { show: false } });
        if (!raw) bands.push({ series: [at + 1, at], fill: `${gone}28` });
      }
    });
    const filled = tables.map((t) => (t[0].length ? t : [[NaN], ...t.slice(1).map(() => [null])]));
    const data = tables.some((t) => t[0].length) ? uPlot.join(filled) : lines.map(() => []);
    this.scale();
    this.logs.setAttribute("aria-pressed", String(this.isLog));
    const small = innerWidth < 600;
    this.wide = this.element.classList.contains("wide");
    this.element.classList.toggle("several", this.paths.length > 1);
    const size = [this.box.clientWidth, this.wide ? (small ? 220 : 280) : 165];
    const key = JSON.stringify([size, lines.length, bands.length, this.isLog, view.axis]);
    if (this.plot && !anew && key === this.key) {
      lines.forEach(({ points }, i) => points && Object.assign(this.plot.series[i].points, { show: () => points.show }));
      this.plot.setData(data, false);
      this.plot.setScale("x", view.range());
    } else {
      this.plot?.destroy();
      this.key = key;
      this.plot = new uPlot(this.options(size, lines, bands), data, this.box);
      this.gestures();
    }
    this.read();
    this.box.setAttribute("aria-label", this.summary());
  }

  scale() {
    const means = this.paths.flatMap(({ counts }) => counts[3]).sort((a, b) => a - b);
    const all = this.paths.flatMap(({ counts, undone }) => [counts, ...undone]);
    const low = all.reduce((least, path) => path[1].reduce((a, b) => Math.min(a, b), least), Infinity);
    const high = all.reduce((most, path) => path[2].reduce((a, b) => Math.max(a, b), most), -Infinity);
    const skewed = high > SKEWED * means[means.length >> 1];
    this.isLog = low > 0 && (this.log ?? skewed);
    this.extent = [low, high];
    const margin = (high - low) * 0.07;
    this.hasLimit = this.limit != null && this.limit >= low - margin && this.limit <= high + margin;
  }

  options([width, height], series, bands) {
    const { view } = this;
    const grid = { stroke: colour("grid"), width: 1 };
    const look = { stroke: colour("dim"), grid, ticks: { show: false }, gap: 4,
      font: "11px system-ui, sans-serif" };
    const times = this.extent[1] / this.extent[0];
    const round = times > 1000 ? [1] : times > 30 ? [1, 3] : [1, 2, 5];
    const isRound = (y) => !this.isLog || round.includes(+(y / 10 ** Math.floor(Math.log10(y) + 1e-9)).toFixed(6));
    const filter = (u, splits) => splits.map((y) => (y != null && isRound(y) ? y : null));
    const room = (u, low, high) => {
      if (low == null) return [0, 1];
      const isConstant = high - low <= CONSTANT * Math.max(Math.abs(low), Math.abs(high));
      const margin = isConstant ? Math.abs(low) * 0.05 || 1 : (high - low) * 0.07;
      return [low - margin, high + margin];
    };
    const ratio = (u, low, high) => (low == null ? [1, 10] : [low / 1.15, high * 1.15]);
    const steps = (u, splits) => splits.map((x) => (view.axis === "time" ? duration(x) : number(x)));
    const values = (u, splits) => splits.map((y) => (y == null ? "" : number(y)));
    return {
      width: Math.max(width, 120), height, series, bands, legend: { show: false },
      padding: [10 + (this.wide ? LABEL * Math.min(ROWS, view.lines.filter((l) => l.text).length) : 0), 14, 0, 0],
      cursor: { sync: { key: view.key, setSeries: false }, points: { show: false }, y: false,
        drag: { x: true, y: false, setScale: false } },
      scales: {
        x: { time: false, range: () => Object.values(view.range()) },
        y: this.isLog ? { distr: 3, range: ratio } : { range: room },
      },
      axes: [
        { ...look, size: 24, values: steps, space: 76 },
        { ...look, grid: { ...grid, filter }, size: this.wide && innerWidth >= 600 ? 84 : 54, values, filter, space: 30 },
      ],
      hooks: {
        draw: [(u) => this.over(u)],
        setCursor: [() => this.read()],
        setSelect: [(u) => this.select(u)],
      },
    };
  }

  select(u) {
    const { left, width } = u.select;
    if (width < 5) return;
    this.view.zoom(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  gestures() {
    const { view, plot } = this;
    plot.over.addEventListener("dblclick", () => view.zoom());
    plot.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const x = plot.posToVal(event.offsetX, "x");
      const { min, max } = view.range();
      const factor = event.deltaY > 0 ? 1.25 : 0.8;
      view.zoom(x - (x - min) * factor, x + (max - x) * factor);
    }, { passive: false });
  }

  // Step and value under the cursor, else the newest that counts; what was undone there beside it.
  read() {
    const { plot, view, paths } = this;
    if (!plot) return;
    const x = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null;
    const slack = (view.range().max - view.range().min) / 50; // behind its end a run has no value
    const near = (points) => (x == null ? points.findLast((p) => !p.gone) ?? points.at(-1)
      : points.at(-1)?.x + slack < x ? null
        : points.reduce((best, p) => (Math.abs(p.x - x) <= Math.abs(best.x - x) ? p : best), points[0]));
    const isBeside = x == null && paths.length > 1;
    const hits = isBeside ? common(paths, view.span()) : paths.map(({ points }) => near(points));
    const first = hits.find(Boolean);
    const place = first?.x == null ? () => "at the end of each" : view.axis === "step" || paths.length === 1 ? (p) => `step ${number(p.step)}`
      : (p) => (view.axis === "time" ? duration(p.x) : `${number(p.x)} ${view.axis}`);
    const texts = hits.map((hit, i) => {
      if (!hit && !paths[i].points.length) return ""; // a rank that does not report it
      const { points, bucket, counts } = paths[i];
      const other = hit && x != null && !hit.gone && points.find((p) => p.gone && p.step === hit.step);
      const undone = hit?.gone ? " (undone)" : other ? ` (undone: ${number(other.value)})` : "";
      const mean = hit?.n && bucket > 1 ? ` mean of ${number(hit.n)}` : "";
      const finite = hit && x == null && isNaN(hit.value) && counts[0].length
        ? ` last finite ${number(counts[3].at(-1))}, step ${number(counts[6].at(-1))}` : "";
      return h("span", paths.length > 1 ? { class: `run${i + 1}` } : {}, number(hit?.value) + undone, h("small", {}, mean + finite));
    });
    const own = this.wide && paths.length === 1 && view.ranks?.length > 1 ? `rank ${this.heads[0].rank}, ` : "";
    this.value.replaceChildren(first ? h("small", {}, `${own}${place(first)}${isBeside && this.isSmooth ? ", averaged" : ""} ·`) : "", ...texts);
  }

  // Incidents, rollbacks, the limit of the rule and what is not finite, over the curves.
  over(u) {
    const { view } = this;
    const { left, top, width, height } = u.bbox;
    const pixel = devicePixelRatio;
    const c = u.ctx;
    const place = (x) => u.valToPos(x, "x", true);
    const line = (x0, y0, x1, y1, dash = []) => {
      c.setLineDash(dash.map((d) => d * pixel));
      c.beginPath();
      c.moveTo(x0, y0);
      c.lineTo(x1, y1);
      c.stroke();
    };
    c.save();
    c.beginPath();
    c.rect(left, top, width, height);
    c.clip();
    c.lineWidth = 1.3 * pixel;
    for (const incident of view.incidents) {
      const name = { SEV0: "red", SEV1: "amber" }[incident.severity] || "gone";
      for (const [from, to] of view.ranges(incident)) {
        c.fillStyle = `${colour(name)}2a`;
        c.fillRect(place(from), top, Math.max(place(to) - place(from), pixel), height);
      }
      c.strokeStyle = colour(name);
      const x = place(view.at(incident));
      line(x, top, x, top + height);
    }
    const labels = [];
    view.lines.forEach(({ tone, dash, text, ...moment }) => {
      const x = place(view.at(moment));
      c.strokeStyle = c.fillStyle = colour(tone);
      line(x, top, x, top + height, dash);
      if (this.wide && text && x >= left && x <= left + width) labels.push([text, x, c.fillStyle]);
    });
    if (this.hasLimit) {
      c.strokeStyle = colour("dim");
      const y = u.valToPos(this.limit, "y", true);
      line(left, y, left + width, y, [2, 4]);
    }
    c.fillStyle = colour("red");
    c.font = `bold ${12 * pixel}px system-ui`;
    c.textAlign = "center";
    let last = -Infinity;
    for (const x of this.broken.map(place)) {
      if (x < last + 10 * pixel) continue; // room for one
      c.fillText("✕", x, top + height - 6 * pixel);
      last = x;
    }
    c.restore();
    c.save(); // texts: over the plot, where they hide no curve
    c.font = `600 ${11 * pixel}px system-ui`;
    c.textAlign = "left";
    labels.forEach(([text, x, tone], i) => {
      const row = labels.length <= ROWS ? i : i % ROWS;
      c.fillStyle = tone;
      c.fillText(text, Math.max(left, Math.min(x, left + width - c.measureText(text).width)), top - (4 + LABEL * row) * pixel);
    });
    c.restore();
  }

  // What the picture shows, for those who do not see it.
  summary() {
    const { name, unit } = this.about;
    const parts = this.paths.map(({ counts, undone }, i) => {
      const [x, low, high, mean] = counts;
      const run = this.paths.length > 1 ? `${this.view.sources[i].label}: ` : "";
      if (!x.length) return `${run}no values`;
      const last = x.length - 1;
      const at = (k) => `at ${this.view.axis} ${number(x[k])}`;
      const least = low.indexOf(low.reduce((a, b) => Math.min(a, b)));
      const most = high.indexOf(high.reduce((a, b) => Math.max(a, b)));
      const gone = undone.length ? `; ${plural(undone.length, "undone stretch")}` : "";
      return `${run}from ${number(mean[0])} ${at(0)} to ${number(mean[last])} ${at(last)}, lowest ` +
        `${number(low[least])} ${at(least)}, highest ${number(high[most])} ${at(most)}${gone}`;
    });
    const broken = this.broken.length ? `; ${plural(this.broken.length, "point")} not finite` : "";
    return `${name}${unit && unit !== "1" ? `, ${unit}` : ""}: ${parts.join("; ")}${broken}`;
  }
}

// A window over the runs, and the charts in it. `changed`: called when it moves.
class View {
  constructor(runs, { axis, window = null, smooth, rank = null } = {}) {
    Object.assign(this, { runs, axis: axis || "step", window, rank, smooth: smooth ?? "auto" });
    this.key = `view-${runs.join("-")}`;
    this.charts = [];
    this.incidents = [];
    this.lines = []; // moments with tone, dash, kind for the legend, and text on wide charts
    this.changed = [];
    this.full = { min: 0, max: 1 };
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) this.charts.find((chart) => chart.box === target)?.seen();
      }
    }, { rootMargin: "300px" });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach((chart) => chart.draw(true)));
    let width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (Math.abs(contentRect.width - width) < 2) return;
      width = contentRect.width;
      clearTimeout(this.resized);
      this.resized = setTimeout(() => this.charts.forEach((chart) => chart.draw()), 100);
    }).observe(MAIN);
  }

  // What a chart draws: each run, or of one run each rank, as many as there are colours.
  get sources() {
    if (this.rank === "all") {
      return this.ranks.slice(0, 6).map((rank) => ({ run: this.runs[0], rank, label: `rank ${rank}` }));
    }
    return this.runs.map((run) => ({ run, rank: this.rank, label: run }));
  }

  show(charts) {
    this.observer.disconnect();
    for (const chart of this.charts) chart.plot?.destroy();
    this.charts = charts;
    for (const chart of charts) this.observer.observe(chart.box);
  }

  range() {
    return this.window ? { min: this.window[0], max: this.window[1] } : this.full;
  }

  // Steps over which curves are averaged: of the window a hundredth.
  span() {
    if (this.smooth !== "auto") return Number(this.smooth);
    const steps = this.heads?.flatMap((head) => head.stretches.flatMap((s) =>
      s.n ? [s.x[1][0], s.x[1][s.n - 1]] : [])) || [];
    return steps.length ? Math.max(3, (Math.max(...steps) - Math.min(...steps)) / 100) : 1;
  }

  // The place of something that has attempt, step and t.
  at({ attempt, step, t, source = 0 }) {
    if (this.axis === "time") return t;
    if (this.axis === "step") return step;
    const own = this.heads?.[source].stretches.filter((s) => s.n && (attempt == null || s.attempt === attempt));
    for (const s of own || []) {
      const i = s.x[1].findIndex((x) => x >= step);
      if (i >= 0) return s.x[3][i];
    }
    return own?.length ? own.at(-1).x[3][own.at(-1).n - 1] : this.full.max;
  }

  // An incident that a relaunch crosses is shaded in both attempts.
  ranges({ attempt, step, t, end }) {
    const [from, to] = [this.at({ attempt, step, t }), end ? this.at(end) : Math.max(this.full.max, this.range().max)];
    if (to >= from) return [[from, to]];
    const old = this.attempts?.find((a) => a.attempt === attempt);
    const fresh = this.attempts?.find((a) => a.attempt === end?.attempt);
    if (!old || !fresh) return [];
    return [[from, this.at({ ...old, step: old.last, t: old.end_t })], [this.at({ ...fresh, step: fresh.first }), to]];
  }

  zoom(from, to) {
    this.window = from == null ? null : [from, Math.max(to, from + 1e-9)];
    const [lo, hi] = this.window || [];
    remember({ lo: lo == null ? null : +lo.toPrecision(8), hi: hi == null ? null : +hi.toPrecision(8) });
    for (const chart of this.charts) chart.plot?.setScale("x", this.range()); // old pixels at once
    this.moved();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 60);
  }

  moved() {
    for (const f of this.changed) f();
  }

  // `live`: only what is new, where that continues what is here.
  async load(live = false) {
    const names = [...new Set(this.charts.map((chart) => chart.name))];
    if (!names.length) {
      this.moved();
      MAIN.dataset.ready = "curves";
      return;
    }
    const turn = (this.turn = (this.turn || 0) + 1);
    const key = JSON.stringify([names, this.axis, this.rank, this.window]);
    const more = live && key === this.loaded;
    const [lo, hi] = this.window || [];
    const width = this.charts[0].box.clientWidth || 400;
    const px = Math.round(Math.min(1600, Math.max(300, width * 1.2)));
    const heads = await Promise.all(this.sources.map(async ({ run, rank }, i) => {
      const query = { x: this.axis, lo, hi, px, rank };
      if (!more) return series(run, names, query);
      const fresh = await series(run, names, { ...query, from: this.heads[i].next });
      return fresh.bucket === this.heads[i].bucket ? extend(this.heads[i], fresh)
        : series(run, names, query);
    }));
    if (turn !== this.turn) return;
    this.heads = heads;
    this.loaded = key;
    if (!this.window) this.measure();
    for (const button of document.querySelectorAll("[aria-label='x axis'] button")) {
      const off = button.textContent === "tokens" && !heads.every((head) => head.tokens);
      button.disabled = off;
      button.title = off ? "this job does not report tokens_seen" : "";
    }
    for (const chart of this.charts) chart.set(heads);
    this.moved();
    MAIN.dataset.ready = "curves";
  }

  measure() {
    let [min, max] = [Infinity, -Infinity];
    for (const { stretches } of this.heads) {
      for (const { x } of stretches) {
        for (const value of x[COLUMNS[this.axis]]) {
          if (value < min) min = value;
          if (value > max) max = value;
        }
      }
    }
    if (min <= max) this.full = { min, max: max + (max - min) * 0.005 + 1e-9 };
  }
}

// What the lines, dashes, marks and shades of the charts are, as far as there are any.
function legend(view) {
  const box = h("div", { class: "legend" });
  view.changed.push(() => {
    const { heads = [], charts, sources, lines } = view;
    const one = view.ranks?.length > 1 && heads[0] ? [["line", `rank ${heads[0].rank}`]] : [];
    const own = sources.length > 1 ? sources.map(({ label }, i) => [`line run${i + 1}`, label]) : one;
    const items = [...own,
      charts.some((c) => c.isSmooth) && ["line faint", "as measured, behind its average"],
      charts.some((c) => c.isDotted) && ["dot", "one sample"],
      heads.some((head) => head.bucket > 1) && ["shade band", "lowest to highest of a point's steps"],
      heads.some((head) => head.stretches.some((s) => s.undone.length)) && ["line gone", "undone: does not count"],
      ...new Map(lines.filter((l) => l.kind).map((l) => [l.kind, [`line dashed ${l.tone}`, l.kind]])).values(),
      ...[...new Set(view.incidents.map((i) => i.severity))].map((grave) => [`shade ${grave.toLowerCase()}`, `incident of ${grave}`]),
      charts.some((c) => c.hasLimit) && ["line limit", "limit of the rule"],
      charts.some((c) => c.broken?.length) && ["bad", "NaN or Inf"]].filter(Boolean);
    box.replaceChildren(...items.map(([kind, text]) => h("span", {}, h("i", { class: kind }, kind === "bad" ? "✕ " : ""), text)));
    box.hidden = !items.length;
  });
  return box;
}

// Buttons of which one is pressed. `options`: value and text; `select` of the element presses another.
function choice(label, options, value, change) {
  const select = (chosen) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === chosen)));
    return change(chosen);
  };
  const buttons = options.map(([option, text]) => h("button", { type: "button",
    "aria-pressed": String(option === value), onclick: () => select(option) }, text));
  return Object.assign(h("span", { class: "segment", role: "group", "aria-label": label }, buttons), { select });
}

function menu(label, options, value, change) {
  const items = options.map(([v, text]) => h("option", { value: v, selected: String(v) === String(value) }, text));
  return h("label", {}, `${label} `, h("select", { onchange: (e) => change(e.target.value) }, items));
}

function controls(view, ranks = []) {
  view.ranks = ranks;
  if (FROZEN || (!ranks.includes(view.rank) && view.rank !== "all")) view.rank = null; // a saved page has the first
  const axis = (name) => {
    view.axis = name;
    view.window = null;
    remember({ x: name === "step" ? null : name, lo: null, hi: null });
    view.load();
  };
  const smooth = (value) => {
    view.smooth = value;
    remember({ smooth: value === "auto" ? null : value });
    for (const chart of view.charts) chart.draw(true);
  };
  const rank = (value) => {
    view.rank = value || null;
    remember({ rank: value });
    view.load();
  };
  const spans = [["auto", "auto"], [0, "none"], [10, "10 steps"], [50, "50 steps"], [200, "200 steps"],
    [1000, "1000 steps"]];
  const whole = h("button", { type: "button", onclick: () => view.zoom() }, "whole run");
  view.changed.push(() => (whole.hidden = !view.window));
  return [
    choice("x axis", Object.keys(COLUMNS).map((name) => [name, name]), view.axis, axis),
    menu("smoothing", spans, view.smooth, smooth),
    ranks.length > 1 && !FROZEN && menu("rank", [["", "first"], ["all", ranks.length > 6 ? "first 6" : "all"], ...ranks.map((r) => [r, r])],
      view.rank ?? "", rank),
    whole,
  ];
}

// Keys of a page with charts.
function keys(view, boards = []) {
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches("input, select, textarea, dialog *") && key !== "Escape") return;
    const { min, max } = view ? view.range() : {};
    const by = view && { ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25], "+": [0.2, -0.2],
      "=": [0.2, -0.2], "-": [-0.33, 0.33] }[key];
    if (by) view.zoom(min + (max - min) * by[0], max + (max - min) * by[1]);
    else if (view && key === "0") view.zoom();
    else if (key === "?") help();
    else if (key === "/") (boards.search || (() => $("input[type=search]")?.focus()))();
    else if (boards[Number(key) - 1]) boards[Number(key) - 1]();
    else return;
    event.preventDefault();
  });
}
