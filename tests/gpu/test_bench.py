"""`matmuld bench gpu` on a GPU: its own kernels, and a run as short as can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matmuld.cli import main
from matmuld.engine.elementwise import read_mask, write_mask

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 300, 70


def test_the_kernels_of_split_steps_are_right() -> None:
    import cupy
    from matmuld.cli.bench.gpu import kernels
    from matmuld.cli.bench.gpu.problems import empty_mask, packed

    rng = np.random.default_rng(0)
    product = rng.standard_normal((COLUMNS, ROWS)).astype(np.float16)
    bias = rng.standard_normal(ROWS).astype(np.float16)
    z = product.astype(np.float32) + bias
    y, aux = cupy.asarray(product), empty_mask(COLUMNS, ROWS)
    kernels.relu_and_mask(y, cupy.asarray(bias), aux)
    np.testing.assert_array_equal(cupy.asnumpy(y), np.maximum(z, 0).astype(np.float16))
    expected = np.zeros(aux.shape[::-1], np.uint8).T
    write_mask(~(z.T < 0), expected)
    np.testing.assert_array_equal(cupy.asnumpy(aux), expected)
    np.testing.assert_array_equal(cupy.asnumpy(packed(cupy.asarray(z >= 0))), expected)
    dx = cupy.asarray(product)
    kernels.mask(dx, aux)
    masked = np.where(read_mask(np, expected, ROWS).T != 0, product, 0)
    np.testing.assert_array_equal(cupy.asnumpy(dx), masked)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_short_run_has_every_subject(tmp_path: Path) -> None:
    words = ("--only", "host", "--rounds", "1", "--budget-seconds", "5")
    assert main(["bench", "gpu", *words, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    (section,) = results["sections"]
    assert section["notes"] == []
    assert {row["clock"] for row in section["rows"]} == {"host"}
    assert (len(section["rows"]), len(results["bars"])) == (4 * 5, 4 * 2)
    assert (tmp_path / "gpu.md").read_text().startswith("# matmuld bench gpu\n")
