// What can be chosen for all curves together.

const controls = document.getElementById("controls");
const resetButton = element("button", "", "Show all again");

function addAxes() {
  const choice = controls.appendChild(element("fieldset", "choice"));
  choice.append(element("legend", "", "Horizontal axis"));
  for (const [kind, { title }] of Object.entries(AXES)) {
    const known = runs.some((run) => run.curves.some((curve) => curve[kind].some((x) => x !== null)));
    const option = choice.appendChild(element("label"));
    const input = option.appendChild(element("input"));
    Object.assign(input, { type: "radio", name: "axis", value: kind, checked: kind === view.axis, disabled: !known });
    option.append(title);
  }
  choice.addEventListener("change", (event) => {
    view.axis = event.target.value;
    zoom(null);
  });
}

// A switch for each name: what is off is in `hidden`.
function addKeys(title, names, hidden, sample) {
  const keys = controls.appendChild(element("div", "keys"));
  keys.setAttribute("role", "group");
  keys.setAttribute("aria-label", title);
  for (const [key, name] of names) {
    const button = keys.appendChild(element("button"));
    button.type = "button";
    button.append(sample(key), element("bdi", "", name));
    button.setAttribute("aria-pressed", String(!hidden.has(key)));
    button.addEventListener("click", () => {
      if (!hidden.delete(key)) hidden.add(key);
      button.setAttribute("aria-pressed", String(!hidden.has(key)));
      for (const chart of charts) chart.draw();
    });
  }
}

addAxes();
if (!single) addKeys("Runs", runs.map((run, at) => [at, run.name]), view.hiddenRuns, (at) => lineSample({ variable: `run-${at % 6}`, width: 3, alpha: 1 }));
if (splits.length > 1) {
  addKeys("Splits", splits.map((split) => [split, split]), view.hiddenSplits, (split) => lineSample({ ...style(0, split), ...(single ? {} : { variable: "ink" }) }));
}
resetButton.type = "button";
resetButton.hidden = true;
resetButton.addEventListener("click", () => zoom(null));
controls.append(resetButton);

for (const section of document.querySelectorAll(".settings")) {
  section.querySelector(".only")?.addEventListener("change", (event) => {
    section.classList.toggle("only-differences", event.target.checked);
  });
}
