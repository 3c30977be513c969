// The report's page: puts charts that zoom in the place of its drawings.
"use strict";

(() => {
  const held = document.getElementById("curves");
  const redrawn = [];
  if (held) {
    const { axes, charts } = JSON.parse(held.textContent), made = [];
    const ends = axes.flatMap((x) => [x[0], x[x.length - 1]]);
    const widest = Math.max(1, ...axes.map((x) => x[1] - x[0]).filter(Boolean));
    const show = () => {
      for (const one of made)
        if (!one.card.closest("details:not([open])")) one.chart.draw(one.x, one.spec);
      const [from, to] = zoom.shown.map(Math.round);
      range.textContent = zoom.range ? `steps ${from} to ${to}` : HINT;
    };
    const zoom = new Zoom(4 * widest, show);
    [zoom.first, zoom.last] = [Math.min(...ends), Math.max(...ends)];
    const tools = make("div", "tools"), range = make("span", "", HINT);
    zoom.buttons(tools);
    range.setAttribute("role", "status");
    tools.append(range);
    held.before(tools);
    for (const card of document.querySelectorAll("[data-chart]")) {
      const spec = charts.find((one) => one.title === card.dataset.chart);
      const place = make("div", "plot"), drawn = card.querySelector(".drawn");
      drawn.before(place);
      card.classList.add("live");
      const chart = new Chart(place, card.querySelector(".latest"), spec.title, zoom);
      made.push({ card, chart, spec, x: axes[spec.axis] });
    }
    for (const fold of document.querySelectorAll("details"))
      fold.addEventListener("toggle", show);
    redrawn.push(show);
    show();
  }
  const lanes = document.querySelector(".timeline");
  if (lanes) {
    const timeline = new Timeline(lanes);
    redrawn.push(() => timeline.draw());
  }
  reachable(document);
  onNewLook(() => redrawn.forEach((draw) => draw()));
  document.body.dataset.ready = "yes";
})();
