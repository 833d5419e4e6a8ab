"""Files of the page, and the route that it reads."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from itertools import combinations
from typing import Any, get_args

import pytest

from gpumond.commands.demo import DIAGNOSIS_SPEED
from gpumond.events import EventKind
from gpumond.facts.shares import SHARES
from gpumond.facts.snapshot import MAX_MISSED_READINGS
from gpumond.facts.verdicts import PATTERN_NAMES
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.page.files import FILES, MODULES, PAGE, POLICY, bundles
from gpumond.view.text import COLORS, FREE_ON_DARK
from tests.helpers.color_vision import COLOR_VISION, MIN_DISTANCE, distance, linear
from tests.helpers.values import TickState, advance, make_device, make_fault, make_snapshot
from tests.serve.application import View, ask

TEXT = {path: file.body.decode() for path, file in FILES.items()}
(STREAM_PATH, FORMS_PATH, LATER_PATH, SCRIPT_PATH) = sorted(path for path in PAGE if path.endswith(".js"))
(STYLE_PATH,) = (path for path in PAGE if path.endswith(".css"))
STYLE = TEXT[STYLE_PATH]
SOURCES = {name: text for name, text in MODULES.items() if name not in ("words", "booleans")}
SCRIPT = "\n".join(SOURCES.values())
MAX_BYTES = 67_000
"""Of the first load, compressed."""
MAX_LATER_BYTES = 15_000
"""Of each script that is requested after the first picture, when a view, form or dialog is opened."""
MAX_FILES = 8
KINDS = {
    "/": "text/html",
    STYLE_PATH: "text/css",
    SCRIPT_PATH: "text/javascript",
    STREAM_PATH: "text/javascript",
    LATER_PATH: "text/javascript",
    FORMS_PATH: "text/javascript",
    "/docs.css": "text/css",
}


@pytest.mark.parametrize(("path", "kind"), KINDS.items())
def test_page_file_has_restrictive_headers(path: str, kind: str):
    answer = ask(View(), path)
    assert answer.status_code == 200
    assert answer.text == TEXT[path]
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    hashed = path in (STYLE_PATH, SCRIPT_PATH, STREAM_PATH, LATER_PATH, FORMS_PATH)
    assert answer.headers["cache-control"] == ("max-age=31536000, immutable" if hashed else "no-cache")


@pytest.mark.parametrize("path", KINDS)
def test_cached_file_is_not_sent_again(path: str):
    etag = ask(View(), path).headers["etag"]
    again = ask(View(), path, headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == POLICY
    assert ask(View(), path, headers={"If-None-Match": '"another"'}).status_code == 200


def test_content_security_policy_allows_no_inline_and_no_external_resources():
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    assert "http" not in POLICY


def test_page_is_served_before_the_first_frame():
    assert ask(View(frame=None), "/").status_code == 200
    assert ask(View(frame=None), "/api/v1/frame").status_code == 503


def test_page_names_kinds_as_the_daemon_does():
    constants = dict(re.findall(r"^export const (\w+) = (.+);$", MODULES["words"], re.MULTILINE))
    known = {name: json.loads(value) for name, value in constants.items()}
    assert tuple(known["SHARES"]) == SHARES
    assert known["ORDINARY"] == sorted(PATTERN_NAMES)
    assert known["MISSED_LIMIT"] == MAX_MISSED_READINGS
    used = {
        name
        for found in re.findall(r"^import \{([^}]+)\} from \"./words.js\";$", SCRIPT, re.MULTILINE)
        for name in re.findall(r"\b[A-Z_]+\b(?! as)|\b[A-Z_]+(?= as)", found)
    }
    assert known.keys() <= used
    kinds = {word for word in (*get_args(EventKind), *PATTERN_NAMES) if f'"{word}"' in SCRIPT}
    assert kinds <= {"flush", "suspend"}  # an element's name, and actions of rules


def test_page_names_its_files_by_their_hash():
    found = re.findall(r'(?:src|href|data-lazyviews|data-forms)="([a-z]+-[0-9a-f]{16}\.(?:css|js))"', TEXT["/"])
    assert [f"/{name}" for name in found] == [STREAM_PATH, STYLE_PATH, SCRIPT_PATH, LATER_PATH, FORMS_PATH]
    assert all(f'from ".{SCRIPT_PATH}";' in TEXT[path] for path in (LATER_PATH, FORMS_PATH))
    for name in found:
        digest = hashlib.sha256(TEXT[f"/{name}"].encode()).hexdigest()
        assert digest[:16] in name


def test_script_contains_every_module_once():
    scripts = TEXT[SCRIPT_PATH] + TEXT[LATER_PATH] + TEXT[FORMS_PATH]
    joined = re.findall(r"^const \$(\w+) = \(\(\) => \{$", scripts, re.MULTILINE)
    assert sorted([*joined, "earlystream"]) == sorted(MODULES)


def test_each_imported_name_is_exported():
    for name, text in MODULES.items():
        for names, module in re.findall(r"^import \{([^}]+)\} from \"./(\w+).js\";$", text, re.MULTILINE):
            exported = set(
                re.findall(r"^export (?:async )?(?:function\*?|class|const) ([\w$]+)", MODULES[module], re.MULTILINE)
            )
            assert {each.split(" as ")[0].strip() for each in names.split(",")} <= exported, (name, module)


MODULES_OF_A_TEST = {
    "page": 'import { one, two as second } from "./values.js";\nimport * as all from "./values.js";\nuse(second);\n',
    "values": "export const one = 1;\nconst hidden = 2;\nexport function* two() {\n  yield hidden;\n}\n",
}


def test_modules_are_joined_in_the_order_of_their_imports():
    (joined,) = bundles(MODULES_OF_A_TEST, "page")
    values, page = joined.split("const $page = ")
    assert values.startswith("const $values = (() => {\nconst one = 1;\nconst hidden = 2;\nfunction* two() {")
    assert values.endswith("return { one, two };\n})();\n")
    assert "const { one, two: second } = $values;\nconst all = $values;\nuse(second);\n" in page


def test_later_module_imports_what_it_shares_with_the_first():
    modules = MODULES_OF_A_TEST | {"later": 'import { one } from "./values.js";\nimport "./own.js";\nuse(one);\n'}
    page, later = bundles(modules | {"own": "use();\n"}, "page", "later")
    (alone,) = bundles(modules, "page")
    assert page == alone.replace("export {  };", "export { $values };")
    assert later.startswith('import { $values } from "./page.js";\nconst $own = ')
    assert "$values = (" not in later
    assert later.index("const $own") < later.index("const $later") < later.index("const { one } = $values;")


COMMENTED = """// About the module.
export const address = "https://one // two"; // left out
  // about two
/** About two,
in lines. */
export const two = 2;
"""


def test_comments_are_left_out_of_the_script():
    (joined,) = bundles({"values": COMMENTED}, "values")
    assert joined.splitlines()[1:3] == ['const address = "https://one // two";', "const two = 2;"]
    assert [line for path in KINDS if path.endswith(".js") for line in re.findall(r"(?:^|\W )// .*", TEXT[path])] == []


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ('import { x } from "./page.js";\n', "page -> values -> page"),
        ("export let one = 1;\n", "export let one"),
        ('import x from "./values.js";\n', "import x from"),
        ("export default 1;\n", "export default"),
    ],
)
def test_modules_that_cannot_be_joined_are_refused(values: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        bundles(MODULES_OF_A_TEST | {"values": values}, "page")


def test_page_states_the_pace_of_the_demo():
    assert f"diagnosis is {DIAGNOSIS_SPEED:.0f} times as fast" in TEXT["/"]
    assert f"takes {60 / DIAGNOSIS_SPEED:.0f} s" in TEXT["/"]


def test_page_is_small():
    first = {path: file for path, file in PAGE.items() if path not in (LATER_PATH, FORMS_PATH)}
    assert sum(len(file.compressed) for file in first.values()) < MAX_BYTES
    assert max(len(FILES[path].compressed) for path in (LATER_PATH, FORMS_PATH)) < MAX_LATER_BYTES
    assert len(PAGE) < MAX_FILES - 1  # one request is that for the stream of frames


def test_page_has_no_external_and_no_inline_resources():
    addresses = {found for text in TEXT.values() for found in re.findall(r"https?://[^\s'\"]+", text)}
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "@import" not in STYLE
    assert not re.findall(r"<style|<script(?![^>]* src=)|\sstyle=|\son[a-z]+=|javascript:", TEXT["/"])


def test_text_never_becomes_markup():
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML|\beval\b|new Function"
    assert not re.findall(ways, SCRIPT)


def test_token_is_stored_in_no_cookie_and_no_persistent_storage():
    assert not re.findall(r"cookie|localStorage|indexedDB", SCRIPT)


def colors(scheme: str) -> dict[str, str]:
    light, _, dark = STYLE.partition("@media (prefers-color-scheme:dark)")
    dark = dark[: dark.index("}")]
    found = re.findall(r"--([a-z]+):(#[0-9a-fA-F]{6})\b", light + (dark if scheme == "dark" else ""))
    found += [("ground", "#FFFFFF")] if scheme == "light" else []
    return {name: value.upper() for name, value in found}


def luminance(color: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    red, green, blue = (linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_shares_contrast_with_the_ground_and_differ_from_one_another(scheme: str):
    all_colors = colors(scheme)
    ground = luminance(all_colors["ground"])
    for share in SHARES:
        low, high = sorted((ground, luminance(all_colors[share])))
        assert (high + 0.05) / (low + 0.05) >= 3, share
    for one, other in combinations((*SHARES, "free"), 2):
        for eye in COLOR_VISION.values():
            assert distance(all_colors[one], all_colors[other], eye) >= MIN_DISTANCE, (one, other)


def test_style_has_the_colors_of_the_palette_in_one_scheme():
    light, dark = colors("light"), colors("dark")
    assert {name for name, color in COLORS.items() if color not in (light[name], dark[name])} == set()
    assert (light["free"], dark["free"]) == (COLORS["free"], FREE_ON_DARK)


def frame_of(view: View) -> Any:
    return ask(view, "/api/v1/frame").json()


def test_frame_equals_the_other_routes():
    whole = frame_of(View())
    for route in ("snapshot", "ledger", "verdicts", "alerts", "processes"):
        assert whole[route] == ask(View(), f"/api/v1/{route}").json(), route
    status = ask(View(), "/api/v1/status").json()
    assert {name: whole[name] for name in ("version", "faults", "conditions")} == {
        name: status[name] for name in ("version", "faults", "conditions")
    }


def test_fault_in_the_frame_has_a_remedy():
    snapshot = make_snapshot(make_device(), faults=(make_fault("GPU-a"),))
    (fault,) = frame_of(View(advance(TickState(), BUILT_IN, snapshot).frame))["faults"]
    assert fault["kind"] == "gpu_is_lost"
    assert "reset" in fault["remedy"]


def test_frame_is_sent_once():
    view = View()
    etag = ask(view, "/api/v1/frame").headers["etag"]
    again = ask(view, "/api/v1/frame", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert view.frame is not None
    view.frame = replace(view.frame, snapshot=replace(view.frame.snapshot, seq=view.frame.snapshot.seq + 1))
    assert ask(view, "/api/v1/frame", headers={"If-None-Match": etag}).status_code == 200


def test_frame_is_compressed_and_has_the_etag_of_the_plain_one():
    plain, packed = (
        ask(View(), "/api/v1/frame", headers={"Accept-Encoding": encoding}) for encoding in ("identity", "gzip")
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["etag"] == f"W/{plain.headers['etag']}"
    assert packed.content == plain.content
    for each in (plain, packed):
        assert ask(View(), "/api/v1/frame", headers={"If-None-Match": each.headers["etag"]}).status_code == 304


def test_frame_etag_differs_after_a_restart():
    before, after = View(), View()
    after.started_at += 60
    etag = ask(before, "/api/v1/frame").headers["etag"]
    assert ask(after, "/api/v1/frame", headers={"If-None-Match": etag}).status_code == 200
