// Tables sort by a click on a column's heading, or by Enter or Space on it. Empty cells stay last.
for (const table of document.querySelectorAll("table.sorts")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const numeric = heading.classList.contains("number");
      const key = (row) => row.cells[column].dataset.key;
      const compare = (a, b) => {
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = numeric ? a - b : a.localeCompare(b, undefined, { numeric: true, sensitivity: "base" });
        return down ? -order : order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((one, other) => compare(key(one), key(other))));
    });
  });
}
