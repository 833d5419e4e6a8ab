"""The real TensorFlow, if it is installed.

A build without CUDA shows that the agent initializes nothing. Keras may have imported other libraries, which have
receipts of their own.
"""

from __future__ import annotations

import importlib.util

import pytest

from gpumond.facts.messages import Report
from tests.helpers.agent_daemon import FakeDaemon, environment, host

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow (pip install tensorflow-cpu)", allow_module_level=True)


def test_tensorflow_without_a_gpu_has_no_pools_and_stays_uninitialized(daemon: FakeDaemon) -> None:
    code = """
import sys, tensorflow
from tensorflow.python.eager import context
before = set(sys.modules)
print("imported", flush=True)
import gpumond.agent
gpumond.agent.start()
sys.stdin.readline()
for use in (False, True):
    if use:
        x, before = tensorflow.constant([1.0]), set(sys.modules)
    initialized = context.context_safe() is not None
    receipts = gpumond.agent.flush(steps=["spill", "cache", "trim"])
    print([receipt.outcome for receipt in receipts if receipt.allocator == "tensorflow"], gpumond.agent.report())
    print(initialized, (context.context_safe() is not None) == initialized)
    print([name for name in set(sys.modules) - before if name.startswith(("tensorflow", "keras"))])
"""
    # TensorFlow writes to stderr about the processor that it was built for.
    with host(code, environment(daemon.path, TF_CPP_MIN_LOG_LEVEL="3"), "-W", "ignore") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imported\n"  # a cold import takes as long as it takes
        framework = daemon.wait(lambda d: next((r.frameworks for r in d.received(Report) if r.frameworks), None))
        assert any(name.startswith("tensorflow 2.") for name in framework)
        out, _ = process.communicate(timeout=60)
        expected = "".join(f"['nothing'] ()\n{used} True\n[]\n" for used in (False, True))
        assert (process.returncode, out) == (0, expected)


def test_device_is_queried_by_its_name_in_the_context() -> None:
    """The adapter relies on this private interface."""
    code = """
import tensorflow as tf
from tensorflow.python import _pywrap_tfe
from tensorflow.python.eager import context
cpus = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
tf.constant([1.0])
own = context.context_safe()
names = [device.name for device in own._logical_devices]
print(names, sorted(_pywrap_tfe.TFE_GetMemoryInfo(own._context_handle, names[1])))
print(own._initialized, own._server_def, own._collective_ops_server_def)
print([physical.name for physical in own._physical_devices if physical in own._visible_device_list])
print([len(own._virtual_device_map.get(physical) or (None,)) for physical in own._physical_devices])
"""
    # Without oneDNN, which is off on processors without AVX-512, the allocator of the CPU has no statistics.
    own = environment("/nowhere", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="1")
    with host(code, own, "-W", "ignore") as process:
        out, _ = process.communicate(timeout=60)
    assert out.splitlines() == [
        "['/device:CPU:0', '/device:CPU:1'] ['current', 'peak']",
        "True None None",
        "['/physical_device:CPU:0']",
        "[2]",
    ]
