#!/usr/bin/env python3
"""Opens the page that the cifar10 example writes in a real browser, at the width of a desktop and of a phone, light
and dark, and takes a picture of each. Fails on an error of a script, on a picture without a size, on text that the
paper's colour hides, and on a page wider than its window.

    scripts/look-at-page.py                      # of a run of a few steps in F32, BF16 and F16
    scripts/look-at-page.py DIR/index.html

Installs Debian's chromium where there is no browser. Where that fails, it says NOT RUN and fails, unless
ALLOW_NOT_RUN=1 is set."""
import argparse
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
WIDTHS = {"desktop": 1280, "phone": 390}
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers them
TALLEST = 8000

# Runs in a copy of the page, which has no script of its own, and sends what it found to the frame around it.
AUDIT = """<script>
const faults = [];
addEventListener("error", event => faults.push("error: " + (event.message || event.target.outerHTML.slice(0, 80))), true);
addEventListener("load", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const light = colour => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + part / 765, 0);
    const paper = light(getComputedStyle(document.body).backgroundColor);
    const pictures = [...document.querySelectorAll("svg, img")];
    for (const picture of pictures) {
        const { width, height, right } = picture.getBoundingClientRect();
        const name = picture.textContent.trim().slice(0, 30) || picture.alt;
        if (width < 40 || height < 40) faults.push(`${name}: ${width} x ${height}`);
        if (right > innerWidth + 1) faults.push(`${name}: ends at ${right} of ${innerWidth}`);
        if (picture.complete === false || picture.naturalWidth === 0) faults.push(`${name}: not loaded`);
    }
    for (const text of document.querySelectorAll("h1, h2, h3, p, td, th, figcaption, li span, svg text")) {
        const style = getComputedStyle(text), inPicture = text.closest("svg");
        const own = light(inPicture ? style.fill : style.color);
        if (Math.abs(own - paper) < 0.25) faults.push(`${text.textContent}: hard to read`);
        const { height } = text.getBoundingClientRect();
        if (inPicture && text.textContent.trim() && !text.getAttribute("transform") && height < 9)
            faults.push(`${text.textContent}: ${height.toFixed(1)} px high`);
    }
    if (root.scrollWidth > innerWidth) faults.push(`the page is ${root.scrollWidth} wide, of ${innerWidth}`);
    parent.postMessage({ faults, dark, paper, pictures: pictures.length, width: innerWidth, height: root.scrollHeight }, "*");
});
</script>"""

# The frame: a window of chromium is 500 wide at least, which no phone is.
FRAME = """<!DOCTYPE html><html><head><meta name="color-scheme" content="light dark"><script>
addEventListener("message", event => {
    const found = document.createElement("pre");
    found.id = "audit";
    found.textContent = JSON.stringify(event.data);
    document.body.append(found);
});
</script></head><body style="margin: 0"><iframe style="border: 0; display: block" src="SOURCE" width="WIDTH"
height="HEIGHT"></iframe></body></html>"""


def browser() -> str | None:
    names = ["chromium", "chromium-browser", "google-chrome"]
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    try:
        for arguments in (["update", "-q"], ["install", "-qy", "--no-install-recommends", "chromium"]):
            subprocess.run([*root, "apt-get", *arguments], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"cannot install chromium: {error}", file=sys.stderr)
    return shutil.which("chromium")


def new_page(folder: pathlib.Path) -> pathlib.Path:
    """That of a run in three precisions. The scale of F16 starts so high that steps are skipped."""
    out = folder / "run"
    options = ["--smoke", "--compare", "f32,bf16,f16", "--init-scale", "16777216", "--out", str(out)]
    command = ["cargo", "run", "--locked", "--example", "cifar10", "--", *options]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("the example failed")
    return out / "index.html"


def run(program: str, scheme: int, size: tuple[int, int], page: pathlib.Path, *arguments: str) -> str:
    """What the browser prints, with the page in a frame of the size."""
    with tempfile.TemporaryDirectory() as profile:
        frame = pathlib.Path(profile) / "frame.html"
        values = {"SOURCE": page.as_uri(), "WIDTH": str(size[0]), "HEIGHT": str(size[1])}
        frame.write_text(re.sub("SOURCE|WIDTH|HEIGHT", lambda name: values[name[0]], FRAME))
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={profile}/data", f"--blink-settings=preferredColorScheme={scheme}",
            f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=5000", *arguments, frame.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"{program} failed on {page}:\n{done.stderr}")
    return done.stdout


def look(program: str, page: pathlib.Path, copy: pathlib.Path, shots: pathlib.Path) -> list[str]:
    """What is wrong with the page, of which `copy` is one with the audit."""
    faults = []
    for (device, width), (scheme, number) in ((d, s) for d in WIDTHS.items() for s in SCHEMES.items()):
        place = f"{device}, {scheme}"
        dom = run(program, number, (width, 900), copy, "--dump-dom")
        found = re.search(r'<pre id="audit">(.*?)</pre>', dom, re.DOTALL)
        if not found:
            faults.append(f"{place}: the audit's script did not end")
            continue
        audit = json.loads(html.unescape(found[1]))
        faults += [f"{place}: {fault}" for fault in audit["faults"]]
        if audit["width"] != width:
            faults.append(f"{place}: the window is {audit['width']} wide, not {width}")
        if audit["dark"] != (scheme == "dark") or (audit["paper"] < 0.5) != (scheme == "dark"):
            faults.append(f"{place}: the paper's lightness is {audit['paper']:.2f}")
        if audit["pictures"] < 8:
            faults.append(f"{place}: {audit['pictures']} pictures only")
        shot = shots / f"{device}-{scheme}.png"
        height = min(audit["height"], TALLEST)
        run(program, number, (width, height), page, f"--screenshot={shot}")
        if not shot.exists() or shot.stat().st_size < 10_000:
            faults.append(f"{place}: no picture was taken")
        print(f"{place}: {audit['pictures']} pictures, {width} x {audit['height']}: {shot}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=pathlib.Path, help="instead of that of a new run")
    arguments = parser.parse_args()
    program = browser()
    if program is None:
        print("look at the page: NOT RUN, for there is no browser; ALLOW_NOT_RUN=1 lets that pass", file=sys.stderr)
        sys.exit(0 if os.environ.get("ALLOW_NOT_RUN") == "1" else 1)
    shots = TARGET / "page"
    shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        page = (arguments.page or new_page(folder)).resolve()
        copy = folder / "audited.html"
        text = page.read_text()
        if text.count("</head>") != 1:
            sys.exit(f"{page} is no page of the example")
        copy.write_text(text.replace("</head>", AUDIT + "</head>"))
        if faults := look(program, page, copy, shots):
            sys.exit("\n".join(["the page has faults:", *faults]))


if __name__ == "__main__":
    main()
