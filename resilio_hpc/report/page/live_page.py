"""The report's page as it is served live: it fetches itself again, and keeps what its reader has opened. Pure."""

from __future__ import annotations

import base64
import hashlib

from resilio_hpc.report.chain.run_report import RunReport
from resilio_hpc.report.page.page import page

EVERY_S = 5
ENDED = "ended"
# Parts are replaced one by one, so that scrolling, the keyboard's place and opened details stay as they are. What is
# fetched is parsed, never run: the policy allows this script alone.
SCRIPT = """
"use strict";
const places = ["header", "main", "footer"];
const name = one => {
  const box = one.closest("section"), row = one.closest("tr");
  const first = row ? row.querySelector("th,td").textContent : "";
  return [box ? box.id : "", first, one.querySelector("summary").textContent.replace(/[0-9.,]+/g, "#")].join("|");
};
const said = document.querySelector("#live");
let shown = "";
async function look() {
  if (document.hidden) return;
  try {
    const stop = new AbortController();
    const late = setTimeout(() => stop.abort(), 30000);
    const answer = await fetch(location.pathname, {cache: "no-store", signal: stop.signal});
    const text = await answer.text();
    clearTimeout(late);
    if (!answer.ok) throw new Error(text.slice(0, 200));
    if (text !== shown) {
      shown = text;
      const next = new DOMParser().parseFromString(text, "text/html");
      const open = new Set([...document.querySelectorAll("details[open]")].map(name));
      const focus = document.activeElement && document.activeElement.id;
      for (const place of places) {
        const old = document.querySelector(place), fresh = next.querySelector(place);
        if (old && fresh) old.replaceWith(document.importNode(fresh, true));
      }
      for (const one of document.querySelectorAll("details")) if (open.has(name(one))) one.open = true;
      if (focus && document.getElementById(focus)) document.getElementById(focus).focus({preventScroll: true});
      document.body.dataset.state = next.body.dataset.state;
    }
    const ended = document.body.dataset.state === "ended";
    said.textContent = (ended ? "The run has ended. " : "Live. ") + "Read at " + new Date().toLocaleTimeString() + ".";
    said.dataset.fresh = "yes";
  } catch (error) {
    said.textContent = "Not up to date: the command that serves this page has ended, or does not answer.";
    said.dataset.fresh = "no";
  }
}
setInterval(look, EVERY_MS);
document.addEventListener("visibilitychange", look);
look();
"""


def script(every_s: float = EVERY_S) -> str:
    """Return the page's script, which looks every so many seconds."""
    return SCRIPT.replace("EVERY_MS", str(int(every_s * 1000)))


def policy(every_s: float = EVERY_S) -> str:
    """Return the page's content security policy: its own script, its own address, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script(every_s).encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def live_page(report: RunReport, every_s: float = EVERY_S) -> str:
    """Return the page of a run that goes on."""
    text = page(report, policy(every_s))
    state = ENDED if report.state.state == "ended" else "under-way"
    head = '<p id="live" class="live" role="status">Live.</p>'
    text = text.replace("</head><body>", f'</head><body data-state="{state}">{head}', 1)
    return text.replace("</body></html>", f"<script>{script(every_s)}</script></body></html>", 1)
