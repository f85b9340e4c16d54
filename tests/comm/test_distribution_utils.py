"""The launch environment: tables of environments and results first, then processes under both launchers."""

import importlib
import itertools
import logging
import os
import sys
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shoal.comm import SessionConfig, apply_session_config
from shoal.comm.horovod import distribution_utils as du
from shoal.comm.horovod import hvd_lib
from shoal.comm.launch import device_utils
from shoal.comm.launch.session import device_index
from shoal.errors import ConfigError
from shoal.testing import mpi_unavailable, run_mpi, run_ranks

pytestmark = pytest.mark.timeout(900)


def product(*axes):
    return list(itertools.product(*axes))


OWNED = ("OMPI_", "MONOLITH_", "BYTEPS_", "DMLC_", "UCX_", "PSLITE_", "NCCL_", "GLOO_", "CUDA_", "MASTER_", "PMIX_")
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture
def env(monkeypatch):
    """A clean environment and state; call it with the variables of the case."""
    for name in list(os.environ):
        if name.startswith(OWNED) or name in TORCHRUN:
            monkeypatch.delenv(name)
    du.reset_for_testing()
    monkeypatch.setattr(du.hvd_lib, "_warned", {"byteps", "horovod"})

    def set_(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    before = dict(os.environ)
    yield set_
    for name in set(os.environ) - set(before):
        del os.environ[name]
    du.reset_for_testing()


@pytest.fixture
def starts(monkeypatch):
    """Profiles that were started, in place of starting them."""
    calls = []
    monkeypatch.setattr(hvd_lib, "init", lambda backend=None, lazy=False: calls.append(backend))
    return calls


# Modules


@pytest.mark.parametrize("module", [du, device_utils, hvd_lib], ids=["distribution_utils", "device_utils", "hvd_lib"])
def test_modules_can_be_imported_from_comm_and_are_the_same(module):
    assert importlib.import_module(f"shoal.comm.{module.__name__.rpartition('.')[2]}") is module


# Helpers and switches

OMPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "size": "OMPI_COMM_WORLD_SIZE",
    "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
TORCH = {"rank": "RANK", "local_rank": "LOCAL_RANK", "size": "WORLD_SIZE", "local_size": "LOCAL_WORLD_SIZE"}
GETTERS = {
    "rank": du.get_mpi_rank,
    "local_rank": du.get_mpi_local_rank,
    "size": du.get_mpi_size,
    "local_size": du.get_mpi_local_size,
}


@pytest.mark.parametrize("quantity", GETTERS)
@pytest.mark.parametrize(("ompi", "torchrun"), product([None, "7", " 05 ", "+3", "", "x"], [None, "9"]))
def test_helpers_read_open_mpi_first_then_torchrun(env, caplog, quantity, ompi, torchrun):
    if ompi is not None:
        env(**{OMPI[quantity]: ompi})
    if torchrun is not None:
        env(**{TORCH[quantity]: torchrun})
    text = ompi if ompi is not None else torchrun
    if text is None:
        default = {"rank": 0, "local_rank": 0, "size": 1, "local_size": 1}[quantity]
        assert GETTERS[quantity]() == default
        assert [r.getMessage() for r in caplog.records] == [f"get_mpi_{quantity} use default {default}"]
    elif text in ("", "x"):
        with pytest.raises(ValueError, match=OMPI[quantity]):
            GETTERS[quantity]()
    else:
        assert GETTERS[quantity]() == int(text)
        assert not caplog.records


def test_only_the_size_is_known(env, caplog):
    env(OMPI_COMM_WORLD_SIZE=12)
    assert [GETTERS[q]() for q in ("rank", "local_rank", "size", "local_size")] == [0, 0, 12, 1]
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (None, 5),
        ("", 5),
        ("true", 1),
        ("Yes", 1),
        ("ON", 1),
        ("False", 0),
        ("no", 0),
        ("off", 0),
        ("-1", -1),
        (" 12 ", 12),
    ],
)
def test_switches_are_integers_or_words(env, text, value):
    if text is not None:
        env(MONOLITH_X=text)
    assert du.env_int("MONOLITH_X", 5) == value


@pytest.mark.parametrize("text", ["Perhaps", " ", "1.5", "0x1"])
def test_another_switch_is_refused_by_name(env, text):
    env(MONOLITH_X=text)
    with pytest.raises(ValueError, match=f"MONOLITH_X must be an integer, .* got {text!r}"):
        du.env_int("MONOLITH_X", 0)


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": ""}, True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, False),
        ({"RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": ""}, True),
    ],
)
def test_mpi_mode_looks_at_presence_only(env, variables, mode):
    env(**variables)
    for flag in (True, False):
        du.FLAGS.enable_sync_training = flag
        assert du.enable_sync_training() is (flag and mode)


def test_unreadable_flags_mean_no_sync_training(env, monkeypatch):
    monkeypatch.setattr(du, "FLAGS", None)
    assert du.enable_sync_training() is False


def test_flags_have_defaults_and_are_parsed(env):
    assert du.FLAGS.parse(["--enable_sync_training", "--num_ps=2", "--is_local=false", "in.toml", "--other"]) == [
        "in.toml",
        "--other",
    ]
    assert du.FLAGS.enable_sync_training is True
    assert (du.FLAGS.num_ps, du.FLAGS.is_local, du.FLAGS.enable_alltoall_metrics_for_slot) == (2, False, None)
    du.reset_for_testing()
    assert du.FLAGS.enable_sync_training is False


# Device strings


@pytest.mark.parametrize(
    ("mpi", "sync", "num_ps", "gpu_flag", "placed", "force", "rank"),
    product([0, 1], [0, 1], [0, 2], [0, 1], [0, 1], [0, 1], [0, 3]),
)
def test_get_device_str_over_its_whole_table(env, mpi, sync, num_ps, gpu_flag, placed, force, rank):
    env(OMPI_COMM_WORLD_RANK=rank)
    if mpi:
        env(OMPI_COMM_WORLD_LOCAL_RANK=0)
    du.FLAGS.enable_sync_training, du.FLAGS.num_ps, du.FLAGS.enable_gpu_training = bool(sync), num_ps, bool(gpu_flag)
    if placed:
        device_utils.enable_gpu_training()
    kind = "GPU" if (gpu_flag or placed) and not force else "CPU"
    want = f"/device:{kind}:0"
    if mpi and sync:
        job = "/job:chief/replica:0/task:0" if rank == 0 else f"/job:worker/replica:0/task:{rank - 1}"
        want = job + want if num_ps else ""
    assert du.get_device_str(force_on_cpu=bool(force)) == want


@pytest.mark.parametrize(
    ("text", "device"),
    [("/device:GPU:3", "cuda:3"), ("/job:w/replica:0/task:1/device:CPU:4", "cpu"), ("", "cpu"), ("/gpu:1", "cuda:1")],
)
def test_device_strings_as_torch_devices(text, device):
    assert du.to_torch_device(text) == torch.device(device)


# Hooks and session settings


@pytest.mark.parametrize(
    ("sync", "byteps", "bcast", "full"),
    product([0, 1], [None, "0", "1", "2"], [None, "-1", "0", "1", "5"], [False, True]),
)
def test_get_sync_run_hooks_over_its_whole_table(env, sync, byteps, bcast, full):
    env(OMPI_COMM_WORLD_LOCAL_RANK=0)
    du.FLAGS.enable_sync_training = bool(sync)
    if byteps is not None:
        env(MONOLITH_WITH_BYTEPS=byteps)
    if bcast is not None:
        env(MONOLITH_WITH_BYTEPS_BCAST=bcast)
    hooks = du.get_sync_run_hooks(full)
    on, by = int(byteps or 0), int(bcast or 1)
    if not sync or (on and by == -1):
        assert hooks == []
        return
    first = hooks[0]
    assert type(first).__name__ == "BroadcastGlobalVariablesHook"
    assert (first.root_rank, first.device, first.backend) == (0, "", "byteps" if on and by else "horovod")
    if on and by and full:
        assert hooks[1].interval == 50
    else:
        assert len(hooks) == 1
    assert du.get_sync_run_hooks(full) is not hooks


def test_a_replaced_broadcast_hook_is_used_until_it_is_restored(env):
    env(OMPI_COMM_WORLD_LOCAL_RANK=0)
    du.FLAGS.enable_sync_training = True
    with mock.patch.object(hvd_lib, "BroadcastGlobalVariablesHook", lambda root, **options: (root, options)):
        assert du.get_sync_run_hooks() == [(0, {"device": "", "backend": "horovod"})]
    assert isinstance(du.get_sync_run_hooks()[0], du.BroadcastGlobalVariablesHook)


def test_a_missing_library_is_an_import_error(env, monkeypatch):
    env(OMPI_COMM_WORLD_LOCAL_RANK=0)
    du.FLAGS.enable_sync_training = True
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(ImportError):
        du.get_sync_run_hooks()
    with pytest.raises(ImportError):
        hvd_lib.init()


@pytest.mark.parametrize(
    ("sync", "byteps", "gdr", "force", "ompi_rank"),
    product([0, 1], ["0", "1"], [None, "FWD", "BWD", "true"], [None, "1", "0", "true"], [None, "3", ""]),
)
def test_update_session_config_over_its_whole_table(env, sync, byteps, gdr, force, ompi_rank):
    env(RANK=0, LOCAL_RANK="5", WORLD_SIZE=8, MONOLITH_WITH_BYTEPS=byteps)
    if ompi_rank is not None:
        env(OMPI_COMM_WORLD_LOCAL_RANK=ompi_rank)
    if gdr in ("FWD", "BWD"):
        env(**{f"MONOLITH_WITH_BYTEPS_{gdr}_GDR": "1"})
    elif gdr:
        env(MONOLITH_WITH_BYTEPS_FWD_GDR=gdr)
    if force is not None:
        env(MONOLITH_FORCE_GPU_COMPATIBLE=force)
    du.FLAGS.enable_sync_training = bool(sync)
    cfg = SessionConfig()
    cfg.gpu_options.per_process_gpu_memory_fraction = 0.9
    cfg.gpu_options.visible_device_list = "old"
    du.update_session_config_for_gpu(cfg)
    gpu = cfg.gpu_options
    if not sync:
        assert (gpu.allow_growth, gpu.per_process_gpu_memory_fraction) == (True, 0.9)
        assert (gpu.visible_device_list, gpu.force_gpu_compatible) == ("old", False)
        return
    pinned = byteps == "1" and gdr in ("FWD", "BWD")
    assert (gpu.allow_growth, gpu.per_process_gpu_memory_fraction) == ((False, 0.4) if pinned else (True, 0.9))
    assert gpu.visible_device_list == (ompi_rank if ompi_rank is not None else "5")
    assert gpu.force_gpu_compatible is (force in (None, "1"))


def test_session_config_defaults_and_device_choice():
    cfg = SessionConfig()
    assert (cfg.gpu_options.allow_growth, cfg.gpu_options.visible_device_list) == (False, "")
    assert (device_index("2", 4), device_index("5", 1), device_index("", 4)) == (2, 0, None)
    for bad in ("4", "x", "-1"):
        with pytest.raises(ConfigError):
            device_index(bad, 4)
    threads = torch.get_num_threads()
    cfg.intra_op_parallelism_threads = 1
    apply_session_config(cfg)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)


# Starting


@pytest.mark.parametrize(
    ("byteps", "bcast", "allreduce", "want"),
    [
        ("0", "0", "0", ["horovod"]),
        (None, None, None, ["horovod"]),
        ("1", None, None, ["bps:job"]),
        ("1", "0", "1", ["bps:job", "horovod"]),
        ("1", "1", "0", ["bps:job", "horovod"]),
        ("1", "-1", "1", ["bps:job"]),
    ],
)
@pytest.mark.parametrize("merge", [None, True, False])
def test_init_sync_train_over_its_table(env, starts, monkeypatch, byteps, bcast, allreduce, want, merge):
    env(OMPI_COMM_WORLD_RANK=12, OMPI_COMM_WORLD_SIZE=16)
    for name, value in (("", byteps), ("_BCAST", bcast), ("_ALLREDUCE", allreduce)):
        if value is not None:
            env(**{f"MONOLITH_WITH_BYTEPS{name}": value})
    monkeypatch.setattr(du, "bps_init", lambda uuid: starts.append(f"bps:{uuid}"))
    conf = types.SimpleNamespace(uuid="job", model_dir="/m", num_ps=9)
    if merge is not None:
        conf.merge_sync_training_ckpt = merge
    du.init_sync_train_and_update_conf(dct_config=conf)
    assert starts == want
    assert du.sync_train_inited()
    model_dir = "/m/job/index-0012" if merge is False else "/m"
    assert conf.model_dir == model_dir
    assert (conf.num_ps, conf.index, conf.num_workers) == (0, 12, 16)
    assert conf.reorder_fids_in_data_pipeline is True
    assert conf.enable_variable_partition is False
    du.init_sync_train_and_update_conf(conf)
    assert (starts, conf.model_dir) == (want, model_dir)


def test_a_missing_library_leaves_the_configuration_alone(env, monkeypatch, caplog):
    def missing(backend=None, lazy=False):
        raise ImportError("no library")

    monkeypatch.setattr(hvd_lib, "init", missing)
    conf = types.SimpleNamespace(uuid="u", model_dir="/m", num_ps=3)
    du.init_sync_train_and_update_conf(conf)
    assert vars(conf) == {"uuid": "u", "model_dir": "/m", "num_ps": 3}
    assert not du.sync_train_inited()
    assert caplog.records[-1].levelno == logging.WARNING
    monkeypatch.setattr(hvd_lib, "init", lambda *a, **k: (_ for _ in ()).throw(OSError("other")))
    with pytest.raises(OSError, match="other"):
        du.init_sync_train_and_update_conf(conf)


@pytest.mark.parametrize(
    ("mpi", "sync", "byteps", "horovod", "visible"),
    product([0, 1], [0, 1], ["0", "1"], ["0", "yes"], [None, "", "6"]),
)
def test_try_init_cuda_over_its_cases(env, starts, mpi, sync, byteps, horovod, visible):
    if mpi:
        env(OMPI_COMM_WORLD_LOCAL_RANK=3)
    env(MONOLITH_WITH_BYTEPS=byteps, MONOLITH_WITH_HOROVOD=horovod)
    if visible is not None:
        env(CUDA_VISIBLE_DEVICES=visible)
    du.FLAGS.enable_sync_training = bool(sync)
    du.try_init_cuda()
    if mpi and visible is None:
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("3", "PCI_BUS_ID")
    else:
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
        assert "CUDA_DEVICE_ORDER" not in os.environ
    want = []
    if mpi and sync:
        want = ["byteps"] if byteps == "1" else ["horovod"] if horovod == "yes" else []
    assert starts == want
    assert du.sync_train_inited() is bool(want)
    du.try_init_cuda()
    assert starts == want


def test_try_init_cuda_swallows_errors(env, monkeypatch, caplog):
    env(OMPI_COMM_WORLD_LOCAL_RANK=0, MONOLITH_WITH_BYTEPS=1, CUDA_VISIBLE_DEVICES="")
    du.FLAGS.enable_sync_training = True
    monkeypatch.setattr(hvd_lib, "init", lambda *a, **k: 1 / 0)
    with caplog.at_level(logging.INFO):
        du.try_init_cuda()
    assert not du.sync_train_inited()
    assert "division" in caplog.text


def test_a_bad_local_rank_leaves_no_half_written_environment(env):
    env(OMPI_COMM_WORLD_LOCAL_RANK="")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_LOCAL_RANK"):
        du.try_init_cuda()
    assert "CUDA_DEVICE_ORDER" not in os.environ


# bps_init


def written(env, starts, monkeypatch, **variables):
    env(**variables)
    monkeypatch.setattr(du, "_interface_ipv4", lambda name: f"addr-of-{name}")
    before = dict(os.environ)
    du.bps_init("job-7")
    assert starts == ["byteps"]
    return {k: v for k, v in os.environ.items() if before.get(k) != v}


BASE = {
    "BYTEPS_ALLTOALL_SESSION_SIZE": "3",
    "BYTEPS_LOCAL_SIZE": "8",
    "PSLITE_UCX_TLS": "rc_x,tcp,self,cuda",
    "DMLC_ROLE": "joint",
    "DMLC_ENABLE_UCX": "1",
    "DMLC_WORKER_ID": "21",
    "DMLC_NUM_WORKER": "32",
    "DMLC_NUM_SERVER": "32",
    "BYTEPS_UUID": "job-7",
    "BYTEPS_LOCAL_RANK": "5",
    "BYTEPS_SOCKET_PATH": "/tmp/bps_job-7_socket_2",
    "BYTEPS_OMP_THREAD_PER_GPU": "1",
    "BYTEPS_FORCE_DISTRIBUTED": "1",
    "BYTEPS_TELEMETRY_ON": "0",
    "BYTEPS_LOG_LEVEL": "info",
    "BYTEPS_SERVER_DIRECT_RESPONSE": "2",
    "BYTEPS_UCX_FORCE_REQ_ORDER": "1",
    "BYTEPS_KEY_HASH_FN": "djb2-colocate",
    "BYTEPS_UCX_SHORT_THRESH": "0",
    "PSLITE_UCX_RNDV_THRESH": "8192",
    "BYTEPS_WORKER_LOCAL_ROOT": "-1",
    "BYTEPS_P2P_PARTITION_BYTES": "16384000",
    "BYTEPS_PARTITION_BYTES": "1024000",
}
RANK21 = {"OMPI_COMM_WORLD_RANK": 21, "OMPI_COMM_WORLD_SIZE": 32, "OMPI_COMM_WORLD_LOCAL_SIZE": 8}


def on(interface):
    return {
        "UCX_RDMA_CM_SOURCE_ADDRESS": f"addr-of-{interface}",
        "DMLC_NODE_HOST": f"addr-of-{interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def test_bps_init_leaves_exactly_the_listed_variables(env, starts, monkeypatch):
    assert written(env, starts, monkeypatch, **RANK21) == {**BASE, **on("eth0")}
    assert os.path.isdir("/tmp/bps_job-7_socket_2")


def test_bps_init_keeps_what_is_default_and_sets_the_rest(env, starts, monkeypatch):
    mine = {
        "BYTEPS_LOG_LEVEL": "debug",
        "DMLC_INTERFACE": "bond0",
        "GLOO_SOCKET_IFNAME": "lo",
        "BYTEPS_PARTITION_BYTES": "1",
    }
    got = written(env, starts, monkeypatch, **RANK21, **mine, DMLC_ROLE="worker", MONOLITH_WITH_BYTEPS_FWD_GDR=1)
    want = {**BASE, **on("bond0")}
    for name in mine:
        want.pop(name, None)
    assert got == want


@pytest.mark.parametrize("all_nics", [False, True])
@pytest.mark.parametrize("gdr", [None, "FWD", "BWD"])
def test_bps_init_binds_network_cards(env, starts, monkeypatch, all_nics, gdr):
    extra = {"BYTEPS_GPU_NIC_BINDING_MODE": 1, "CUDA_VISIBLE_DEVICES": "9"}
    if all_nics:
        extra["BYTEPS_WITH_ALL_NICS"] = 1
    if gdr:
        extra[f"MONOLITH_WITH_BYTEPS_{gdr}_GDR"] = 1
    want = {**BASE, **on("eth2"), "BYTEPS_USE_GDR_ALLREDUCE": "1"}
    if all_nics:
        want["UCX_NET_DEVICES"] = "mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,eth0,eth1,eth2,eth3"
        want["NCCL_IB_HCA"] = "mlx5_0,mlx5_1,mlx5_2,mlx5_3"
    else:
        want |= {"UCX_NET_DEVICES": "mlx5_2:1", "NCCL_IB_HCA": "mlx5_2"}
    if gdr:
        want |= {
            "CUDA_VISIBLE_DEVICES": "5",
            "BYTEPS_PIN_MEMORY": "1",
            "BYTEPS_PIN_MEMORY_CPU": "1",
            "DMLC_NUM_CPU_DEV": "0",
            "DMLC_NUM_GPU_DEV": "1",
            "NCCL_NET_GDR_LEVEL": "SYS",
        }
    assert written(env, starts, monkeypatch, **RANK21, **extra) == want


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_bps_init_names_the_missing_variable_and_writes_nothing(env, starts, missing):
    env(**{k: v for k, v in RANK21.items() if k != missing})
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match=missing):
        du.bps_init("u")
    assert dict(os.environ) == before
    assert starts == []


@pytest.mark.parametrize("name", ["BYTEPS_GPU_NIC_BINDING_MODE", "BYTEPS_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_bps_init_names_a_variable_that_is_no_number_and_writes_nothing(env, starts, name):
    env(OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, **{name: "two"})
    before = dict(os.environ)
    with pytest.raises(ValueError, match=f"{name} must be an integer.*got 'two'"):
        du.bps_init("u")
    assert dict(os.environ) == before
    assert not starts


def test_bps_init_takes_torchruns_variables_and_large_sizes(env, starts, monkeypatch):
    got = written(env, starts, monkeypatch, RANK=130, WORLD_SIZE=256)
    assert (got["BYTEPS_LOCAL_SIZE"], got["BYTEPS_LOCAL_RANK"], got["BYTEPS_PARTITION_BYTES"]) == ("1", "0", "512000")
    assert got["BYTEPS_P2P_PARTITION_BYTES"] == "2048000"
    assert got["BYTEPS_SOCKET_PATH"].endswith("_130")


def test_bps_init_warns_of_round_robin_placement(env, starts, monkeypatch, caplog):
    got = written(env, starts, monkeypatch, **RANK21, OMPI_COMM_WORLD_LOCAL_RANK=2)
    assert got["BYTEPS_LOCAL_RANK"] == "2"
    assert "launcher" in caplog.text


def test_an_interface_without_address_is_empty_with_a_warning(env, starts, caplog):
    env(**RANK21, DMLC_INTERFACE="nosuch0")
    du.bps_init("u")
    assert os.environ["DMLC_NODE_HOST"] == ""
    assert "nosuch0" in caplog.text
    assert du._interface_ipv4("lo") == "127.0.0.1"
    assert du._interface_ipv4("") == du._interface_ipv4("lo" * 10) == ""


@pytest.mark.parametrize(
    ("variable", "names", "kept"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "nosuch0,lo", True),
        ("GLOO_SOCKET_IFNAME", "nosuch0", False),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "^nosuch0", True),
    ],
)
def test_only_interfaces_that_nobody_has_are_hidden(env, monkeypatch, caplog, variable, names, kept):
    env(**{variable: names})
    hidden = []
    monkeypatch.setattr(os, "unsetenv", hidden.append)
    hvd_lib._hide_missing_interfaces()
    assert (hidden == []) is kept
    assert (variable in caplog.text) is not kept


# Benchmarks


@pytest.mark.parametrize(
    ("src", "dst", "call", "suffix", "length"),
    [
        (True, True, "alltoall", "g2g", 64),
        (False, True, "alltoall_cpu2gpu", "c2g", 64),
        (True, False, "alltoall_gpu2cpu", "g2c", 64),
        (False, False, "alltoall", "c2c", 8),
    ],
)
def test_all_to_all_plans(src, dst, call, suffix, length):
    plan = du.byteps_a2a_plan(64, 4, dst_gpu=dst, src_gpu=src)
    assert plan == (length, length // 4, call, f"data_len_{length}_{suffix}")
    assert (plan.total_len, plan.per_peer, plan.call, plan.name) == plan


def test_an_all_to_all_that_does_not_divide_is_an_assertion():
    with pytest.raises(AssertionError):
        du.byteps_a2a_plan(65, 4)


def test_goodput_is_counted_every_twenty_iterations(env, monkeypatch, capsys):
    import time

    clock = [100.0]
    names = []

    def push_pull(tensor, average=True, name=None):
        assert tensor.shape == (1000, 1)
        assert tensor[0, 0] == 3.0
        names.append(name)
        clock[0] += 0.5

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(hvd_lib, "push_pull", push_pull)
    monkeypatch.setattr(hvd_lib, "rank", lambda: 2)
    assert du.byteps_benchmark_ar(1000, 65, use_cpu=True) == pytest.approx([1000 * 32 / 500 / 1e6] * 2)
    assert set(names) == {"data_len_1000_pushpull_cpu"}
    assert len(names) == 65
    assert du.byteps_benchmark_ar(1000, 39, use_cpu=True) == []
    out = capsys.readouterr().out
    assert "iteration" not in out
    assert "rank 2/" in out


def test_gpu_benchmarks_return_nothing_without_cuda(env):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert du.byteps_benchmark_ar(10, 40) == []
    assert du.byteps_benchmark_a2a(10, 40) == []


def test_bps_comm_benchmark_runs_the_kinds_that_are_asked_for(env, monkeypatch, capsys):
    calls = []

    def a2a(total_len, total_niter=10000, dst_gpu=True, src_gpu=True):
        calls.append((total_len, total_niter, dst_gpu, src_gpu))
        return [1.0, 3.0] if total_len == 64 else []

    monkeypatch.setattr(du, "byteps_benchmark_a2a", a2a)
    monkeypatch.setattr(
        du, "byteps_benchmark_ar", lambda n, it, use_cpu=False, op="pushpull": calls.append((n, it, use_cpu)) or [4.0]
    )
    for bad in (None, "none", "x"):
        if bad is not None:
            env(MONOLITH_BENCHMARK_BPS=bad)
        with pytest.raises(AssertionError, match=bad or "none"):
            du.bps_comm_benchmark()
    env(MONOLITH_BENCHMARK_BPS="all", MONOLITH_BENCHMARK_BPS_A2A_LEN=64, MONOLITH_BENCHMARK_BPS_AR_LEN=5)
    du.bps_comm_benchmark()
    want = []
    for dst, src in ((True, False), (True, True), (False, False), (False, True)):
        want += [(64, 200, dst, src), (32, 200, dst, src), (16, 200, dst, src)]
    assert calls == [*want, (5, 200, True), (5, 200, False)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "c2g_summary: [(64, 2.0), (32, nan), (16, nan)]"
    assert [line.split("_")[0] for line in lines] == ["c2g", "g2g", "c2c", "g2c", "ar"]
    assert lines[-1] == "ar_summary: [(5, 4.0), (5, 4.0)]"


# Telemetry


class Context:
    def __init__(self, step=0):
        self.global_step = step


def test_telemetry_fires_strictly_after_the_interval(env, monkeypatch, caplog):
    rows = [
        ("a.AllToAll.x", 1.234, 0.5, 7),
        *((f"PushPull.{i}", 2.0, 0.0, 1) for i in range(5)),
        ("broadcast", 1, 1, 1),
    ]
    monkeypatch.setattr(hvd_lib, "get_telemetry", lambda: rows)
    monkeypatch.setattr(hvd_lib, "rank", lambda: 0)
    hook = du.ByteCCLTelemetryHook(20)
    fired = []
    with caplog.at_level(logging.INFO):
        for step in range(1, 70):
            caplog.clear()
            hook.after_run(Context(step), None)
            if caplog.records:
                fired.append(step)
                lines = [r.getMessage() for r in caplog.records]
    assert fired == [21, 42, 63]
    assert lines[0] == "name: a.AllToAll.x mean(ms): 1.23 stdev(ms): 0.50 count: 7"
    assert len(lines) == 4
    with pytest.raises(RuntimeError):
        hook.after_create_session(object())
    hook.after_create_session(Context(0))
    monkeypatch.setattr(hvd_lib, "rank", lambda: 1)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        hook.after_run(Context(1000), None)
    assert not caplog.records


def test_the_property_reads_the_switch_each_time(env):
    assert hvd_lib.enable_bps is False
    env(MONOLITH_WITH_BYTEPS=1)
    assert hvd_lib.enable_bps is True
    with pytest.raises(ConfigError):
        hvd_lib.init("smoke-signals")


# Devices


def op(device="", type="MatMul", name="op", **kw):
    return types.SimpleNamespace(device=device, type=type, name=name, **kw)


def test_the_placement_rule(env):
    rule = device_utils.device_rule
    assert rule("") == "/device:CPU:0"
    assert rule("/job:trainer/task:4/device:GPU:1") == "/job:trainer/task:4/device:CPU:0"
    assert rule("/job:ps/replica:0/task:1") == "/job:ps/replica:0/task:1/device:CPU:0"
    assert rule("/device:CPU:3") == "/device:CPU:3"
    assert rule("GPU:2") == "/device:CPU:0"
    device_utils.enable_gpu_training()
    assert device_utils.is_gpu_training()
    assert rule("GPU:2") == "GPU:2"
    assert rule("/job:trainer/task:4/device:GPU:1") == "/job:trainer/task:4/device:GPU:1"
    assert rule("/job:a") == "/job:a/device:CPU:0"
    device_utils.disable_gpu_training()
    with pytest.raises(ConfigError):
        rule("/planet:mars")


def test_contexts_merge_and_say_where_they_are(env):
    inside = device_utils.within_placement_context_of
    assert not inside("CPU")
    assert not inside("GPU")
    device_utils.enable_gpu_training()
    with device_utils.maybe_device_if_allowed("/job:w/task:1/device:GPU:0"):
        assert inside("GPU")
        with device_utils.maybe_device_if_allowed("/device:CPU:0") as device:
            assert device == "/job:w/task:1/device:CPU:0"
            assert inside("CPU")
            assert torch.ones(1).device.type == "cpu"
        assert inside("GPU")
    assert not inside("GPU")


def test_public_names_come_from_the_package_too():
    import shoal.comm

    for module in (du, device_utils):
        assert all(getattr(shoal.comm, name) is getattr(module, name) for name in module.__all__)


def test_placement_functions(env):
    assert device_utils.get_visible_gpus(9, 4) == "2"
    for bad in (0, 1.0, True):
        with pytest.raises(AssertionError):
            device_utils.get_visible_gpus(1, bad)
    fn = device_utils.default_device_fn
    device_utils.enable_gpu_training()
    gpu = "/device:GPU:0"
    assert fn(op(gpu)) == gpu
    assert fn(op(gpu, type="Const", dtype="string")) == "/device:CPU:0"
    assert fn(op(gpu, type="Const", dtype="float32")) == gpu
    assert fn(op(gpu, name="WriteScalar")) == "/device:CPU:0"
    assert fn(op(gpu, name="LossSummary")) == "/device:CPU:0"
    assert fn(None) == "/device:CPU:0"
    assert device_utils.model_device_fn(op()) == gpu
    assert device_utils.model_device_fn(op("/job:a/device:CPU:0")) == "/job:a/device:CPU:0"
    assert device_utils.serving_input_device_fn(op()) == "/device:CPU:0"
    assert device_utils.serving_input_device_fn(op("x")) == "x"
    assert device_utils.input_device_fn(None) == "/device:CPU:0"


@pytest.mark.parametrize(("sync", "mpi", "num_ps", "local"), product([0, 1], [0, 1], [0, 2], [0, 1]))
def test_get_device_fn_over_its_table(env, sync, mpi, num_ps, local):
    env(OMPI_COMM_WORLD_RANK=4)
    if mpi:
        env(OMPI_COMM_WORLD_LOCAL_RANK=0)
    du.FLAGS.enable_sync_training, du.FLAGS.num_ps, du.FLAGS.is_local = bool(sync), num_ps, bool(local)
    task = types.SimpleNamespace(type="worker", index=3)
    if sync and not mpi:
        with pytest.raises(AssertionError):
            device_utils.get_device_fn({"ps": []}, task)
        return
    fn = device_utils.get_device_fn({"ps": ["a"]}, task)
    if sync and num_ps:
        assert fn(op()) == "/job:worker/replica:0/task:3"
        assert fn(op("/task:9/device:CPU:0")) == "/job:worker/replica:0/task:9/device:CPU:0"
        assert device_utils.input_device_fn(op()) == "/job:worker/replica:0/task:3/device:CPU:0"
    elif sync:
        assert fn is device_utils.default_device_fn
    elif local:
        assert fn is None
    elif num_ps:
        places = [fn(op(type="VarHandleOp")) for _ in range(3)] + [fn(op())]
        assert places == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0", "/job:worker/task:3"]
    if not sync:
        assert device_utils.get_device_fn(None, task) is None
        assert device_utils.get_device_fn({"ps": []}) is None


# Processes


def train_like(rank, world, launcher):
    """What both launchers must agree on."""
    du.FLAGS.enable_sync_training = True
    seen = [du.get_mpi_rank(), du.get_mpi_size(), du.get_mpi_local_rank(), du.get_mpi_local_size()]
    seen += [du.enable_sync_training(), du.get_device_str(), len(du.get_sync_run_hooks())]
    conf = types.SimpleNamespace(uuid=f"test-{launcher}-{os.getppid()}", model_dir="/m", merge_sync_training_ckpt=False)
    du.init_sync_train_and_update_conf(conf)
    seen += [conf.index, conf.num_workers, conf.model_dir.endswith(f"index-{rank:04d}")]
    assert du.get_mpi_rank() == conf.index
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    ctx = du.RunContext(model, global_step=rank + 5)
    for hook in du.get_sync_run_hooks():
        hook.after_create_session(ctx)
    flat = torch.cat([p.detach().reshape(-1).float() for p in [*model.parameters(), *model.buffers()]])
    everyone = hvd_lib.allgather(flat.reshape(1, -1))
    assert torch.equal(everyone, everyone[:1].expand(world, -1))
    assert ctx.global_step == 5
    assert hvd_lib.allgather(torch.full((rank,), rank)).tolist() == [r for r in range(world) for _ in range(r)]
    assert hvd_lib.allreduce(torch.tensor([float(rank)])).item() == (world - 1) / 2
    assert hvd_lib.allreduce(torch.tensor([rank]), average=False).item() == sum(range(world))
    for root in (-1, world):
        with pytest.raises(ValueError, match="root_rank must be"):
            hvd_lib.broadcast(torch.tensor([rank]), root)
    assert hvd_lib.broadcast(torch.tensor([rank]), 1).item() == 1
    for dtype in (torch.int16, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float64):
        ones = torch.ones(2 * world, 3).to(dtype)
        for got in (hvd_lib.broadcast(torch.full_like(ones, rank), 1), hvd_lib.alltoall(ones, [2] * world)):
            assert torch.equal(got, ones)
            assert got.dtype == dtype
        assert torch.equal(hvd_lib.allgather(ones), ones.repeat(world, 1))
        assert dtype == torch.bool or torch.equal(hvd_lib.allreduce(ones), ones)
        assert hvd_lib.alltoall(ones[:0], [0] * world).shape == (0, 3)
    rows = torch.arange(world * 2).reshape(world * 2, 1) + 100 * rank
    splits = [2] * world
    got = hvd_lib.alltoall(rows, splits)
    assert torch.equal(got, hvd_lib.alltoall(rows, splits, recv_splits=splits))
    assert got.flatten().tolist() == [100 * r + 2 * rank + i for r in range(world) for i in range(2)]
    for counts in ([2] * (world + 1), [-1, 2 * world + 1, *[0] * (world - 2)]):
        for wrong in ({"splits": counts}, {"splits": splits, "recv_splits": counts}):
            with pytest.raises(ValueError, match="must be one number >= 0"):
                hvd_lib.alltoall(rows, **wrong)
    os.environ["BYTEPS_PARTITION_BYTES"] = "8"
    group = hvd_lib.push_pull_group(
        [torch.ones(1) * rank, torch.ones(2), torch.tensor([rank]), torch.ones(1)], average=False
    )
    assert [t.tolist() for t in group] == [[sum(range(world))], [world] * 2, [sum(range(world))], [world]]
    os.environ["BYTEPS_TELEMETRY_ON"] = "1"
    hvd_lib.push_pull(torch.ones(3), name="w")
    assert [(n, c) for n, _, _, c in hvd_lib.get_telemetry()] == [("PushPull.w", 1)]
    os.environ["BYTEPS_TELEMETRY_ON"] = "0"
    assert len(du.byteps_benchmark_ar(64, 60, use_cpu=True)) == 2
    assert len(du.byteps_benchmark_a2a(64 * world, 60, dst_gpu=False, src_gpu=False)) == 2
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_torchrun_ranks(world):
    results = run_ranks(world, train_like, "torchrun", timeout_s=300, backend=None)
    assert results == [[r, world, r, world, True, "", 1, r, world, True] for r in range(world)]


@pytest.mark.skipif(mpi_unavailable() is not None, reason=str(mpi_unavailable()))
@pytest.mark.parametrize("world", [2])
def test_mpirun_ranks_agree_with_torchruns(world):
    results = run_mpi(world, train_like, "mpirun", timeout_s=300)
    assert results == [[r, world, r, world, True, "", 1, r, world, True] for r in range(world)]


def byteps_ranks(rank, world):
    os.environ["MONOLITH_WITH_BYTEPS"] = "1"
    du.bps_init("real")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert hvd_lib.allreduce(torch.tensor([1.0]), average=False).item() == world
    return (hvd_lib.rank(), hvd_lib.size())


def test_bps_init_starts_communication_whatever_interfaces_there_are():
    assert run_ranks(2, byteps_ranks, timeout_s=300, backend=None) == [(0, 2), (1, 2)]


def test_a_size_of_one_needs_no_launcher():
    assert run_ranks(1, alone, timeout_s=300, backend=None) == [True]


def alone(rank, world):
    for name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    hvd_lib.init("horovod")
    ones = torch.ones(2, 3).t()
    got = hvd_lib.broadcast(ones, 0)
    assert torch.equal(got, ones)
    assert got.is_contiguous()
    assert got.data_ptr() != ones.data_ptr()
    return hvd_lib.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


def test_ranks_on_other_nodes_must_say_where_rank_zero_is(env):
    env(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_SIZE=2)
    with pytest.raises(RuntimeError, match="mpirun -x MASTER_ADDR"):
        hvd_lib.init("horovod")


def test_an_importable_profile_says_who_this_is(env, monkeypatch):
    fake = types.ModuleType("horovod.torch")
    fake.init, fake.rank, fake.size = (lambda: None), (lambda: 3), (lambda: 5)
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", fake)
    hvd_lib.init("horovod", lazy=True)
    assert (hvd_lib.rank(), hvd_lib.size(), hvd_lib.local_rank()) == (3, 5, 0)
