// The box that says what is under the pointer, for eyes, and in words for a screen reader.

class Reading {
  constructor(host) {
    this.host = host;
    this.box = host.appendChild(element("div", "reading"));
    this.box.hidden = true;
  }

  // where: a line of text; rows: {sample, label, value, at}, at being where the value was taken.
  show(left, where, rows) {
    const table = element("table");
    for (const row of rows) {
      const line = table.insertRow();
      line.dataset.label = row.label;
      const name = line.insertCell();
      if (row.sample) name.append(row.sample);
      name.append(element("bdi", "", row.label));
      line.append(element("td", "value", row.value), element("td", "at", row.at ?? ""));
    }
    this.box.replaceChildren(element("div", "where", where), table);
    this.box.hidden = false;
    this.place(left);
  }

  place(left) {
    const width = this.host.clientWidth, own = this.box.offsetWidth;
    const right = left + 14 + own <= width;
    const at = right ? left + 14 : left - 14 - own;
    this.box.style.left = `${Math.max(0, Math.min(at, width - own))}px`;
    // Where it fits on neither side it would cover the curves.
    const fits = right || left - 14 - own >= 0;
    this.box.style.top = fits ? "8px" : "auto";
    this.box.style.bottom = fits ? "auto" : "100%";
  }

  hide() {
    this.box.hidden = true;
  }

  speak() {
    const rows = [...this.box.querySelectorAll("tr")].map((row) => row.innerText.replace(/\s+/g, " "));
    const where = this.box.querySelector(".where")?.textContent ?? "";
    document.getElementById("spoken").textContent = [where, ...rows].join("; ");
  }
}
