// What the report and the live page share: curves by uPlot, the zoom of pictures that belong
// together, and the timeline of lanes. Defines functions and classes, and touches no page by itself.
"use strict";

const make = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};
const colour = (css) => getComputedStyle(document.documentElement)
  .getPropertyValue(css.slice("var(".length, -1)).trim();

const digits = (value, count) => String(+value.toPrecision(count));
const FORMS = {
  number: (value) => {
    const size = Math.abs(value);
    for (const [limit, unit, by] of [[1e9, "G", 1e9], [1e6, "M", 1e6], [1e4, "k", 1e3]])
      if (size >= limit) return digits(value / by, 3) + unit;
    if (size >= 1000)
      return value % 100 ? Math.round(value).toLocaleString("en-US") : digits(value / 1e3, 3) + "k";
    return size && size < 1e-3 ? value.toExponential(1) : digits(value, 3);
  },
  percent: (value) => digits(100 * value, 3) + " %",
  seconds: (value) => {
    const size = Math.abs(value), whole = Math.round(size), minutes = Math.floor(whole / 60);
    if (size === 0) return "0 s";
    if (size < 1e-3) return digits(1e6 * value, 3) + " µs";
    if (size < 1) return digits(1e3 * value, 3) + " ms";
    if (size < 100) return digits(value, 3) + " s";
    return minutes < 60 ? `${minutes} min ${whole % 60} s`
      : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  },
};
const write = (form, value) =>
  value === null || value === undefined ? "–" : FORMS[form](value);

const HINT = "drag to zoom, double-click for all; keys: arrows, + and −, 0; Ctrl and the wheel";

// The part of an axis that some pictures show together. `draw` is called when it has changed.
class Zoom {
  constructor(least, draw) {
    this.first = 0;
    this.last = 1;
    this.least = least; // the narrowest range
    this.range = null; // null: all
    this.draw = draw;
  }

  get shown() { return this.range || [this.first, this.last]; }

  to(range) {
    if (range) {
      const span = Math.min(Math.max(this.least, range[1] - range[0]), this.last - this.first);
      const from = Math.max(this.first, Math.min(range[0], this.last - span));
      range = [from, Math.min(this.last, from + span)];
      if (range[0] <= this.first && range[1] >= this.last) range = null;
    }
    this.range = range;
    this.draw();
  }

  by(factor, at) {
    const [from, to] = this.shown, fixed = at === undefined ? (from + to) / 2 : at;
    this.to([fixed - (fixed - from) * factor, fixed + (to - fixed) * factor]);
  }

  move(share) {
    const [from, to] = this.shown, step = share * (to - from);
    if (this.range) this.to([from + step, to + step]);
  }

  // Keys, wheel and double click on a picture; `plot` gives the uPlot that is in it.
  listen(place, plot) {
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    const keys = {
      ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25),
      "+": () => this.by(0.5), "=": () => this.by(0.5), "-": () => this.by(2),
      "0": () => this.to(null), Escape: () => this.to(null),
    };
    place.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
    place.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // the page scrolls; a pinch has ctrlKey
      event.preventDefault();
      const left = event.clientX - plot().over.getBoundingClientRect().left;
      this.by(event.deltaY > 0 ? 1.25 : 0.8, plot().posToVal(left, "x"));
    }, { passive: false });
    place.addEventListener("dblclick", () => this.to(null));
  }

  // The same for those who have neither keys nor a wheel.
  buttons(place) {
    const acts = [
      ["←", "Move left", () => this.move(-0.25)], ["→", "Move right", () => this.move(0.25)],
      ["+", "Zoom in", () => this.by(0.5)], ["−", "Zoom out", () => this.by(2)],
      ["Show all", "", () => this.to(null)],
    ];
    const group = make("span");
    for (const [text, name, act] of acts) {
      const button = make("button", "", text);
      button.type = "button";
      if (name) button.setAttribute("aria-label", name);
      button.addEventListener("click", act);
      group.append(button);
    }
    place.append(group);
  }

  // uPlot's settings for dragging over a picture.
  get cursor() {
    return { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } };
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.to([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  // uPlot's setting for the axis of a picture; `plot.setData` reads it again.
  get scale() {
    return { time: false, range: () => {
      const [from, to] = this.shown;
      return [from, to > from ? to : from + 1];
    } };
  }
}

const axisStyle = () => ({
  stroke: colour("var(--muted)"), grid: { stroke: colour("var(--grid)"), width: 1 },
  ticks: { show: false }, font: "11px system-ui, sans-serif",
});

// One chart. `spoken` is the element that says the last values, or those under the pointer.
class Chart {
  constructor(place, spoken, title, zoom) {
    Object.assign(this, { place, spoken, title, zoom, plot: null, shape: "", spec: null, x: [] });
    zoom.listen(place, () => this.plot);
  }

  // spec: {form, low, high, curves: [{colour, dashed, mean, trend, low, high}]} over steps x
  draw(x, spec) {
    Object.assign(this, { x, spec });
    const columns = [x], series = [{}], bands = [];
    for (const curve of spec.curves) {
      const stroke = colour(curve.colour), thin = { spanGaps: true, points: { show: false } };
      if (curve.trend.length) {
        const at = columns.length;
        columns.push(curve.high, curve.low, curve.mean);
        series.push({ ...thin, width: 0 }, { ...thin, width: 0 },
          { ...thin, width: 1, stroke: stroke + "66" });
        bands.push({ series: [at, at + 1], fill: stroke + "2b" });
      }
      columns.push(curve.trend.length ? curve.trend : curve.mean);
      const few = !curve.trend.length &&
        curve.mean.filter((value) => value !== null).length <= (curve.dashed ? 1 : 60);
      series.push({ ...thin, stroke, width: curve.dashed ? 1.5 : 2,
        dash: curve.dashed ? [5, 4] : undefined, points: { show: few, size: 6, fill: stroke } });
    }
    const last = spec.curves.map((curve) =>
      write(spec.form, curve.mean.findLast((value) => value !== null)));
    this.say();
    this.place.setAttribute("aria-label", `${this.title} over steps, last ${last.join(", ")}`);
    const width = this.place.clientWidth || 360;
    const shape = JSON.stringify([width, series, spec.form]);
    if (this.plot && this.shape === shape) { this.plot.setData(columns); return; }
    if (this.plot) this.plot.destroy();
    this.shape = shape;
    this.plot = this.made(width, series, bands, columns);
  }

  made(width, series, bands, columns) {
    const { form, low, high } = this.spec, free = { pad: 0.1, soft: 0, mode: 3 };
    const bound = (value) => typeof value === "number" ? { pad: 0.1, soft: value, mode: 1 } : free;
    return new uPlot({
      width, height: 190, series, bands,
      scales: { x: this.zoom.scale, y: { range: { min: bound(low), max: bound(high) } } },
      axes: [
        { ...axisStyle(), size: 30, values: (_, ticks) =>
          ticks.map((tick) => tick % 1 ? "" : FORMS.number(tick)) },
        { ...axisStyle(), size: 54, values: (_, ticks) => ticks.map((tick) => write(form, tick)) },
      ],
      legend: { show: false },
      cursor: { ...this.zoom.cursor, sync: { key: "steps" } },
      hooks: {
        setSelect: [(plot) => this.zoom.selected(plot)],
        setCursor: [(plot) => this.say(plot.cursor.idx)],
      },
    }, columns, this.place);
  }

  // The values at a place of the axis, or the first and the last one.
  say(at) {
    const { form, curves } = this.spec, off = at === null || at === undefined;
    this.spoken.parentElement.classList.toggle("pointed", !off);
    if (off) {
      const ends = (values) => {
        const known = values.filter((value) => value !== null);
        return [known[0], known[known.length - 1]].map((value) => write(form, value));
      };
      this.spoken.textContent = curves.length === 1 ? ends(curves[0].mean).join(" → ")
        : curves.map((curve) => ends(curve.mean)[1]).join(" · ");
      return;
    }
    const known = (values) => { // of a figure that not every step has: the one before
      const ended = values.slice(at).every((value) => value === null);
      return ended ? null : values.slice(0, at + 1).findLast((value) => value !== null);
    };
    const told = curves.map((curve) => write(form, known(curve.mean)));
    if (curves.length === 1 && curves[0].trend.length && curves[0].low[at] !== null)
      told[0] += ` (${write(form, curves[0].low[at])} to ${write(form, curves[0].high[at])})`;
    this.spoken.textContent = `step ${this.x[at]}: ${told.join(" · ")}`;
  }
}

// The timeline of lanes in an element with a drawing of it and, as JSON, its pieces:
// {seconds, legend: [[words, colour]], terms: [{name, colour, inside}], steps: [[name, start, end]],
//  rows: [{name, lanes, pieces: [[start, seconds, term]]}]}, where `term` is a place in `terms`
class Timeline {
  constructor(root, range) {
    this.chart = JSON.parse(root.querySelector("script").textContent);
    this.zoom = new Zoom(this.chart.seconds / 5000, () => this.plot.setData(this.plot.data));
    this.zoom.last = this.chart.seconds;
    this.zoom.range = range && range[1] <= this.chart.seconds ? range : null;
    this.tools = make("div", "tools");
    this.place = make("div", "plot lanes");
    this.spoken = make("p", "note", HINT);
    this.zoom.buttons(this.tools);
    this.tools.append(this.spoken);
    root.classList.add("live");
    root.prepend(this.tools, this.place, this.legend());
    this.zoom.listen(this.place, () => this.plot);
    const count = this.chart.rows.length;
    this.place.setAttribute("aria-label", `timeline of ${count} lane${count > 1 ? "s" : ""}`);
    this.draw();
  }

  legend() {
    const legend = make("div", "legend");
    for (const [words, fill] of this.chart.legend) {
      const entry = make("span"), box = make("i", fill ? "box" : "box idle");
      if (fill) box.style.background = fill;
      entry.append(box, words);
      legend.append(entry);
    }
    return legend;
  }

  draw() {
    if (this.plot) this.plot.destroy();
    const { rows, seconds } = this.chart, count = rows.length;
    const middle = rows.map((_, row) => count - row - 0.5);
    this.plot = new uPlot({
      width: this.place.clientWidth || 800, height: 56 + count * (count > 16 ? 18 : 34),
      series: [{}, {}], legend: { show: false }, padding: [26, 12, 0, 0],
      scales: { x: this.zoom.scale, y: { range: [0, count] } },
      axes: [
        { ...axisStyle(), size: 30, values: (plot, ticks) => ticks.map((tick) => write("seconds", tick)) },
        { ...axisStyle(), size: 100, splits: middle, grid: { show: false },
          values: () => rows.map((row) => row.name) },
      ],
      cursor: this.zoom.cursor,
      hooks: {
        draw: [(plot) => this.paint(plot)],
        setSelect: [(plot) => this.zoom.selected(plot)],
        setCursor: [(plot) => this.say(plot)],
      },
    }, [[0, seconds], [null, null]], this.place);
  }

  paint(plot) {
    const { ctx, bbox } = plot, { rows, terms, steps } = this.chart, ratio = uPlot.pxRatio;
    const fills = terms.map((term) => colour(term.colour));
    const each = bbox.height / rows.length, bar = each * 0.78, idle = hatched(ctx, ratio);
    const inside = colour("var(--on-series)"), { min, max } = plot.scales.x;
    const place = (moment) => plot.valToPos(moment, "x", true);
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    const widths = terms.map((term) => ctx.measureText(term.inside).width); // 0 but for stages
    this.marks(ctx, bbox, steps, place, ratio);
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.textAlign = "center";
    rows.forEach((row, number) => {
      const top = bbox.top + number * each + (each - bar) / 2;
      ctx.fillStyle = idle;
      ctx.fillRect(bbox.left, top, bbox.width, bar);
      for (const [start, length, term] of row.pieces) {
        if (start > max || start + length < min) continue;
        const left = Math.max(place(start), bbox.left);
        const wide = Math.min(place(start + length), bbox.left + bbox.width) - left;
        ctx.fillStyle = fills[term];
        ctx.fillRect(left, top, Math.max(wide, 0.5 * ratio), bar);
        if (!widths[term] || bar < 14 * ratio || widths[term] + 12 * ratio > wide) continue;
        ctx.fillStyle = inside;
        ctx.fillText(terms[term].inside, left + wide / 2, top + bar / 2);
      }
    });
    ctx.restore();
  }

  // Where steps begin, and how long each took, above the lanes.
  marks(ctx, bbox, steps, place, ratio) {
    ctx.strokeStyle = ctx.fillStyle = colour("var(--muted)");
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.textAlign = "start";
    for (const [name, start, end] of steps) {
      const left = Math.max(place(start), bbox.left);
      const right = Math.min(place(end), bbox.left + bbox.width);
      if (right - left > ctx.measureText(name).width)
        ctx.fillText(name, left + 4 * ratio, bbox.top - 12 * ratio);
      if (start <= 0 || left <= bbox.left || right <= left) continue;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top - 20 * ratio);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
  }

  say(plot) {
    const { left, top } = plot.cursor, { rows, terms } = this.chart;
    const row = rows[Math.floor(top / plot.over.clientHeight * rows.length)];
    if (left < 0 || !row) return;
    const at = plot.posToVal(left, "x");
    const near = plot.posToVal(left + 1, "x") - at; // a pixel
    const found = row.pieces.find(([start, length]) =>
      start - near <= at && at <= start + Math.max(length, near));
    this.spoken.textContent = `${row.lanes}: ` + (found
      ? `${terms[found[2]].name}, ${write("seconds", found[1])} from ${write("seconds", found[0])}`
      : "idle");
  }
}

function hatched(ctx, ratio) {
  const tile = make("canvas"), size = 8 * ratio, pen = tile.getContext("2d");
  tile.width = tile.height = size;
  pen.fillStyle = colour("var(--track)");
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colour("var(--hatch)");
  pen.lineWidth = 2 * ratio;
  for (const from of [-size, 0, size]) {
    pen.moveTo(from, size);
    pen.lineTo(from + size, 0);
  }
  pen.stroke();
  return ctx.createPattern(tile, "repeat");
}

// Lets the keyboard reach what scrolls.
function reachable(root) {
  for (const one of root.querySelectorAll(".scroll, pre"))
    if (one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight) one.tabIndex = 0;
  for (const fold of root.querySelectorAll("details"))
    fold.addEventListener("toggle", () => reachable(fold));
}

// Calls back when the width of the window or the colour scheme has changed.
function onNewLook(act) {
  let waiting = 0;
  const later = () => { clearTimeout(waiting); waiting = setTimeout(act, 150); };
  addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
}
