// Light or dark: as the system is, or as the switch says.

const root = document.documentElement;
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const probe = document.body.appendChild(element("i"));
probe.hidden = true;
// All plots of the page, to be drawn again together.
const plots = new Set();

// Where storage is forbidden the choice lasts as long as the page.
const storage = {
  read() { try { return localStorage.getItem("hvdtrain-theme"); } catch { return null; } },
  write(theme) { try { localStorage.setItem("hvdtrain-theme", theme); } catch { /* as above */ } },
};

function chosenTheme() {
  return document.querySelector("#theme :checked").value;
}

function applyTheme(theme = chosenTheme()) {
  root.dataset.theme = theme === "auto" ? (systemIsDark.matches ? "dark" : "light") : theme;
  for (const plot of plots) plot.draw();
}

// The present colour of a variable of the style sheet, for a canvas.
function colour(name) {
  return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
}

const remembered = document.querySelector(`#theme [value="${CSS.escape(storage.read() ?? "auto")}"]`);
if (remembered) remembered.checked = true;
document.getElementById("theme").addEventListener("change", () => {
  storage.write(chosenTheme());
  applyTheme();
});
systemIsDark.addEventListener("change", () => applyTheme());
applyTheme();

// Paper is white, and as wide as it is.
addEventListener("beforeprint", () => {
  root.classList.add("print");
  applyTheme("light");
});
addEventListener("afterprint", () => {
  root.classList.remove("print");
  applyTheme();
});
