// The report's browser of rollouts: what lies in the page as data becomes text, never markup.
"use strict";

if (document.getElementById("rollouts")) (() => {
  const rows = JSON.parse(document.getElementById("rollouts").textContent);
  const [text, why, sort, list, count] =
    ["find", "why", "sort", "found", "count"].map((id) => document.getElementById(id));
  const SHOWN = 10;
  let shown = SHOWN;
  for (const one of [...new Set(rows.map((row) => row.why))].sort())
    why.append(new Option(one, one));
  const counted = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");
  const card = (row) => {
    const made = make("article", "card sample"), head = make("header");
    const tone = row.reward === null ? "plain" : row.reward > 0.5 ? "good" : "bad";
    head.append(make("span", "pill plain", "step " + row.step));
    head.append(make("span", "pill " + tone,
      row.reward === null ? "no reward" : "reward " + +row.reward.toPrecision(4)));
    const calls = row.turns.reduce((sum, turn) => sum + turn.tools.length, 0);
    if (row.turns.length)
      head.append(make("span", "", counted(row.turns.length, "turn") + ", " + counted(calls, "call")));
    for (const [name, value] of [["advantage", row.advantage], ["version", row.version]])
      if (value !== null) head.append(make("span", "", name + " " + +value.toPrecision(4)));
    if (row.why) head.append(make("span", "", row.why));
    if (row.answer !== null) head.append(make("span", "", "expected " + row.answer));
    const body = make("div", "text");
    body.append(make("span", "label", "prompt"), make("pre", "prompt", row.prompt));
    if (row.turns.length < 2)
      body.append(make("span", "label", "completion"), make("pre", "", row.completion));
    else row.turns.forEach((turn, number) => {
      body.append(make("span", "label", "turn " + (number + 1)), make("pre", "", turn.text));
      if (turn.result) body.append(
        make("span", "label", "answer of " + (turn.tools.join(", ") || "nobody")),
        make("pre", "prompt", turn.result));
    });
    made.append(head, body);
    return made;
  };
  const show = () => {
    const wanted = text.value.toLowerCase(), [key, sign] = sort.value.split(" ");
    const found = rows.filter((row) => (!why.value || row.why === why.value) &&
      (row.prompt + "\n" + row.completion).toLowerCase().includes(wanted));
    const value = (row) => ["length", "turns"].includes(key) ?
      row[key === "length" ? "completion" : key].length : row[key];
    found.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)));
    list.replaceChildren(...found.slice(0, shown).map(card));
    count.textContent = found.length + " of " + rows.length;
    if (found.length > shown) {
      const more = make("button", "pill plain", "show more");
      more.addEventListener("click", () => { shown += SHOWN; show(); });
      list.append(more);
    }
    reachable(list);
  };
  for (const one of [text, why, sort])
    one.addEventListener("input", () => { shown = SHOWN; show(); });
  document.getElementById("browser").hidden = false;
  show();
})();
