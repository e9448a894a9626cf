"""Side by side: the same bytes for any number of workers, local or of a Dask cluster."""

import logging
import warnings
from pathlib import Path

import pytest

from alphastomics.errors import InputError
from alphastomics.preprocessing.worker_pool import WorkerPool
from tests.preprocessing.tissue import digests, make_slice, run, write

SETTINGS = {"max_cells_per_file": 50, "max_shard_size": 60}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    for number, form in enumerate(["csr", "csc", "dense"]):
        write(folder, **{f"s{number}": make_slice(120, 20, number, form)})
    return folder


def test_two_workers_give_the_bytes_of_one(source, tmp_path):
    for workers in (1, 2):
        run(source, tmp_path / str(workers), workers=workers, **SETTINGS)
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_a_worker_says_what_is_wrong_with_its_file(source, tmp_path):
    folder = write(tmp_path / "in", good=make_slice(), bad=make_slice(dims=4))
    with pytest.raises(InputError, match=r"bad\.h5ad: obsm\['spatial'\] has 4 columns"):
        run(folder, tmp_path / "out", workers=2)


def test_a_dask_cluster_gives_the_bytes_of_one_worker(source, tmp_path):
    distributed = pytest.importorskip("distributed")
    run(source, tmp_path / "one", **SETTINGS)
    with (
        warnings.catch_warnings(),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
    ):
        warnings.simplefilter("ignore")  # what the cluster says of ports and sizes
        run(source, tmp_path / "dask", scheduler=cluster.scheduler_address, **SETTINGS)
    assert digests(tmp_path / "one") == digests(tmp_path / "dask")


def test_a_scheduler_that_does_not_answer_is_the_callers_mistake(source, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("alphastomics.preprocessing.worker_pool.CONNECT_SECONDS", 0.3)
    with pytest.raises(InputError, match=r"--scheduler tcp.*: no Dask scheduler"):
        run(source, tmp_path / "out", scheduler="tcp://127.0.0.1:9")


def test_results_come_in_the_order_of_the_tasks():
    with WorkerPool(2, None) as pool:
        finished: list[int] = []
        assert pool.run(abs, [-3, 2, -1, 0], finished.append) == [3, 2, 1, 0]
        assert sorted(finished) == [-3, -1, 0, 2]
