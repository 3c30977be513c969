// The live page: asks for curves whenever the server says that something is new, and draws them.
"use strict";

const $ = (id) => document.getElementById(id);
const charts = new Map(); // key -> {card, plot, shape, spoken}
const hidden = new Set(); // numbers of runs that are not shown
let data = null, zoom = null, busy = false, again = false, nextDetails = 0, detailsTimer = 0;

const make = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const shade = (run) => colour("--series-" + (run % 8));
const short = (value) => value === null || value === undefined ? "–"
  : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2)
  : String(+value.toPrecision(4));
const shown = (curve) => !hidden.has(curve.run);

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const range = zoom ? `&from=${zoom[0]}&to=${zoom[1]}` : "";
    const answer = await fetch(`data?points=400${range}`);
    data = await answer.json();
    drawRuns(); drawKeys(); drawCharts();
    document.body.dataset.ready = "yes";
    refreshDetails(false);
  } finally {
    busy = false;
    if (again) { again = false; refresh(); }
  }
}

function drawRuns() {
  const names = data.runs.map((run) => run.name + run.state).join("\n");
  if ($("runs").dataset.names === names) return;
  $("runs").dataset.names = names;
  const kept = document.activeElement && document.activeElement.dataset.run;
  $("runs").replaceChildren(...data.runs.map((run, number) => {
    const label = make("label"), box = make("input"), swatch = make("i");
    box.type = "checkbox";
    box.checked = !hidden.has(number);
    box.dataset.run = number;
    box.addEventListener("change", () => {
      box.checked ? hidden.delete(number) : hidden.add(number);
      drawCharts();
    });
    swatch.style.background = `var(--series-${number % 8})`;
    label.append(box, swatch, make("span", "", run.name), make("small", "", run.state));
    if (kept === String(number)) queueMicrotask(() => box.focus());
    return label;
  }));
  if ($("which").options.length !== data.runs.length)
    $("which").replaceChildren(...data.runs.map((run, number) => new Option(run.name, number)));
}

function drawKeys() {
  const rows = Object.entries(data.differing);
  $("differing").hidden = rows.length === 0;
  const head = make("tr");
  head.append(make("th", "", "key"), ...data.runs.map((run) => make("th", "", run.name)));
  $("keys").replaceChildren(head, ...rows.map(([key, values]) => {
    const row = make("tr");
    row.append(make("td", "", key), ...values.map((value) => make("td", "", value)));
    return row;
  }));
}

function drawCharts() {
  const wanted = $("find").value.toLowerCase();
  for (const chart of data.charts) {
    const one = charts.get(chart.key) || newChart(chart);
    one.card.hidden = !chart.key.toLowerCase().includes(wanted);
    if (!one.card.hidden && (chart.leading || $("others").open)) draw(one, chart);
  }
  for (const [key, one] of charts)
    if (!data.charts.some((chart) => chart.key === key)) one.card.hidden = true;
  $("range").textContent = zoom ? `steps ${zoom[0]} to ${zoom[1]}` : "";
  $("all").disabled = zoom === null;
}

function newChart(chart) {
  const card = make("article", "card"), head = make("header"), place = make("div", "plot");
  const spoken = make("div", "latest");
  head.append(make("h3", "", chart.key), spoken);
  card.append(head, place);
  card.dataset.key = chart.key;
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  place.addEventListener("keydown", keys);
  place.addEventListener("dblclick", () => zoomTo(null));
  (chart.leading ? $("leading") : $("rest")).append(card);
  const one = { card, place, spoken, plot: null, shape: "" };
  charts.set(chart.key, one);
  return one;
}

function draw(one, chart) {
  const curves = chart.curves.filter(shown);
  const columns = [data.x], series = [{}], bands = [];
  for (const curve of curves) {
    const stroke = shade(curve.run), points = { show: data.x.length < 60, size: 5 };
    if (curve.low.length) {
      const at = columns.length;
      columns.push(curve.high, curve.low);
      series.push({ width: 0, spanGaps: true, points: { show: false } },
        { width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [at, at + 1], fill: stroke + "30" });
    }
    columns.push(curve.mean);
    series.push({ label: data.runs[curve.run].name, stroke, width: 2, spanGaps: true, points });
  }
  const last = (values) => values.findLast((value) => value !== null);
  const say = curves.map((curve) => short(last(curve.mean))).join(" · ");
  one.spoken.textContent = say;
  one.place.setAttribute("aria-label", `${chart.key} over steps, last ${say}`);
  const width = one.place.clientWidth || 360;
  const shape = [curves.map((curve) => [curve.run, curve.low.length > 0]), width,
    data.x.length < 60, colour("--ink")].join();
  if (one.plot && one.shape === shape) { one.plot.setData(columns); return; }
  if (one.plot) one.plot.destroy();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false }, font: "11px system-ui, sans-serif" };
  one.shape = shape;
  one.plot = new uPlot({
    width, height: 190, series, bands,
    scales: { x: { time: false } },
    axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => tick % 1 ? "" : short(tick)) },
      { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "steps" } },
    hooks: {
      setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const [from, to] = [plot.select.left, plot.select.left + plot.select.width]
          .map((pixel) => Math.round(plot.posToVal(pixel, "x")));
        plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        zoomTo([from, to]);
      }],
      setCursor: [(plot) => {
        const at = plot.cursor.idx;
        one.spoken.textContent = at === null || at === undefined ? say
          : `step ${plot.data[0][at]}: ` + plot.series.map((line, index) => [line, index])
            .filter(([line, index]) => index && line.width)
            .map(([, index]) => short(plot.data[index][at])).join(" · ");
      }],
    },
  }, columns, one.place);
}

function zoomTo(range) {
  if (range) {
    const span = Math.max(1, range[1] - range[0]);
    const from = Math.max(data.first, Math.min(range[0], data.last - span));
    range = [from, Math.min(data.last, from + span)];
    if (range[0] <= data.first && range[1] >= data.last) range = null;
  }
  zoom = range;
  refresh();
}

function keys(event) {
  const [from, to] = zoom || [data.first, data.last], span = to - from;
  const step = Math.max(1, Math.round(span / 4));
  const ranges = {
    ArrowLeft: [from - step, to - step], ArrowRight: [from + step, to + step],
    "+": [from + step, to - step], "=": [from + step, to - step],
    "-": [from - step, to + step], "0": null, Escape: null,
  };
  if (!(event.key in ranges) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const range = ranges[event.key];
  if (range && range[1] <= range[0]) return;
  zoomTo(range);
}

// The report's parts take longer to make the longer the run: they are asked for less often then.
async function refreshDetails(now) {
  clearTimeout(detailsTimer);
  const wait = nextDetails - performance.now();
  if (!now && wait > 0) { detailsTimer = setTimeout(() => refreshDetails(false), wait); return; }
  nextDetails = Infinity;
  const began = performance.now(), number = $("which").value || 0;
  $("report").href = `report?run=${number}`;
  const answer = await fetch(`details?run=${number}`);
  const opened = [...$("details").querySelectorAll("details")].map((one) => one.open);
  if (answer.ok) $("details").innerHTML = await answer.text();
  $("details").querySelectorAll("details").forEach((one, n) => { one.open = !!opened[n]; });
  for (const one of $("details").querySelectorAll(".scroll, pre")) one.tabIndex = 0;
  nextDetails = performance.now() + Math.max(3000, 20 * (performance.now() - began));
  document.body.dataset.details = "yes";
}

function say(text, tone) {
  $("connection").textContent = text;
  $("connection").className = "pill " + tone;
}

$("find").addEventListener("input", drawCharts);
$("all").addEventListener("click", () => zoomTo(null));
$("others").addEventListener("toggle", () => data && drawCharts());
$("which").addEventListener("change", () => refreshDetails(true));
for (const query of ["(prefers-color-scheme: dark)"])
  matchMedia(query).addEventListener("change", () => data && drawCharts());
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => data && drawCharts(), 150);
});
const events = new EventSource("events");
events.addEventListener("message", refresh);
events.addEventListener("open", () => say("live", "good"));
events.addEventListener("error", () => say("connection lost", "bad"));
