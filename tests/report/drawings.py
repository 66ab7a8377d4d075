"""Reads the charts of a page: marks of Vega's scene, their positions, and the chart's signals."""

import json
from typing import Any

from tests.report.browser import Browser
from tests.waiting import until

SCENE = """((selector) => {
  const view = document.querySelector(`${selector} > div`)?.view;
  if (!view) return null;
  const found = [];
  const walk = (item, x, y) => (item.items ?? []).forEach((mark) => mark.items.forEach((each) => {
    if (mark.marktype === "group") walk(each, x + (each.x ?? 0), y + (each.y ?? 0));
    else if (mark.role === "mark") {
      const { x1, x2, y1, y2 } = each.bounds;
      found.push({ type: mark.marktype, shape: each.shape ?? null, x: x + (x1 + x2) / 2, y: y + (y1 + y2) / 2,
                   width: x2 - x1, opacity: each.opacity ?? 1, row: each.datum });
    }
  }));
  const [left, top] = [view.origin()[0] + view.padding().left, view.origin()[1] + view.padding().top];
  view.scenegraph().root.items.forEach((root) => walk(root, left + (root.x ?? 0), top + (root.y ?? 0)));
  return found;
})(%s)"""


def marks(browser: Browser, selector: str, kind: str) -> list[dict[str, Any]]:
    """The marks of one kind in a chart, once it is drawn; their places are those on its canvas."""
    until(lambda: browser.evaluate(SCENE % json.dumps(selector)) is not None)
    return [mark for mark in browser.evaluate(SCENE % json.dumps(selector)) if mark["type"] == kind]


def point_at(browser: Browser, selector: str, mark: dict[str, Any], click: bool = False) -> str:
    """The tooltip's text with the pointer on a mark."""
    canvas = f"document.querySelector({json.dumps(f'{selector} :is(canvas, svg)')})"
    browser.evaluate(f"{canvas}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    box = browser.evaluate(f"{canvas}.getBoundingClientRect().toJSON()")
    place = {"x": box["x"] + mark["x"], "y": box["y"] + mark["y"]}
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
    for kind in ("mousePressed", "mouseReleased") if click else ():
        browser.send("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)
    told = browser.evaluate("document.getElementById('tip').innerText")
    assert isinstance(told, str)
    return told


def signal(browser: Browser, selector: str, name: str, value: object) -> None:
    """Set a signal of a chart, and wait until that is drawn."""
    browser.evaluate(
        f"document.querySelector({json.dumps(selector + ' > div')}).view"
        f".signal({json.dumps(name)}, {json.dumps(value)}).runAsync().then(() => 0)"
    )
