// The live page: asks for curves whenever the server says that something is new, and draws them.
"use strict";

const $ = (id) => document.getElementById(id);
const charts = new Map(); // key -> {card, chart}
const hidden = new Set(); // numbers of runs that are not shown
const zoom = new Zoom(1, () => refresh());
let data = null, busy = false, again = false, nextDetails = 0, detailsTimer = 0, timeline = null;

const shown = (curve) => !hidden.has(curve.run);
const form = (key) => key.startsWith("seconds/") ? "seconds"
  : /(^|\/)(accuracy|success)(\/|$)/.test(key) ? "percent" : "number";

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const range = zoom.range && zoom.range.map(Math.round);
    const asked = range ? `&from=${range[0]}&to=${range[1]}` : "";
    const answer = await fetch(`data?points=400${asked}`);
    data = await answer.json();
    [zoom.first, zoom.last] = [data.first, data.last];
    $("range").textContent = range ? `steps ${range[0]} to ${range[1]}` : "";
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
    if (one.card.hidden || !(chart.leading || $("others").open)) continue;
    const curves = chart.curves.filter(shown)
      .map((curve) => ({ ...curve, colour: `var(--series-${curve.run % 8})` }));
    one.chart.draw(data.x, { form: form(chart.key), curves });
  }
  for (const [key, one] of charts)
    if (!data.charts.some((chart) => chart.key === key)) one.card.hidden = true;
}

function newChart(chart) {
  const card = make("article", "card"), head = make("header"), place = make("div", "plot");
  const spoken = make("div", "latest");
  head.append(make("h3", "", chart.key), spoken);
  card.append(head, place);
  card.dataset.key = chart.key;
  (chart.leading ? $("leading") : $("rest")).append(card);
  const one = { card, chart: new Chart(place, spoken, chart.key, zoom) };
  charts.set(chart.key, one);
  return one;
}

// The report's parts take longer to make the longer the run: they are asked for less often then.
async function refreshDetails(now) {
  clearTimeout(detailsTimer);
  const used = $("details").contains(document.activeElement); // it would lose the focus
  const wait = used ? 1000 : nextDetails - performance.now();
  if (!now && wait > 0) { detailsTimer = setTimeout(() => refreshDetails(false), wait); return; }
  nextDetails = performance.now() + 60000; // a timer takes an infinite wait for none
  const began = performance.now(), number = $("which").value || 0;
  $("report").href = `report?run=${number}`;
  const answer = await fetch(`details?run=${number}`);
  const opened = [...$("details").querySelectorAll("details")].map((one) => one.open);
  if (answer.ok) $("details").innerHTML = await answer.text();
  $("details").querySelectorAll("details").forEach((one, n) => { one.open = !!opened[n]; });
  const lanes = $("details").querySelector(".timeline");
  timeline = lanes && new Timeline(lanes, now || !timeline ? null : timeline.zoom.range);
  reachable($("details"));
  nextDetails = performance.now() + Math.max(3000, 20 * (performance.now() - began));
  document.body.dataset.details = "yes";
}

function say(text, tone) {
  $("connection").textContent = text;
  $("connection").className = "pill " + tone;
}

zoom.buttons($("zoom"));
$("find").addEventListener("input", drawCharts);
$("others").addEventListener("toggle", () => data && drawCharts());
$("which").addEventListener("change", () => refreshDetails(true));
onNewLook(() => {
  if (data) drawCharts();
  if (timeline) timeline.draw();
});
const events = new EventSource("events");
events.addEventListener("message", refresh);
events.addEventListener("open", () => say("live", "good"));
events.addEventListener("error", () => say("connection lost", "bad"));
