"""Views: what is told of instances and models, with the keys of the JSON in their order."""

import json
from dataclasses import replace

from appliance.core.placement import Device
from appliance.core.views import (
    FileView,
    GpuReplicaView,
    GpuView,
    InstanceView,
    JobProgress,
    ModelView,
    ReplicaView,
    VerificationView,
)
from testing.specs import instance, spec

FIRST = ReplicaView(0, "127.0.0.1:8080", 8080, 8700, None, None, "starting", 3, None)
SECOND = ReplicaView(1, "127.0.0.1:8081", 8081, 8701, 5, 77, "running", None, 2)
VIEW = InstanceView(
    instance(spec("a", replicas=2, pooling="cls"), restarts=4),
    engine="embedded",
    startup_timeout_secs=300,
    replicas=(FIRST, SECOND),
    health_check_failures=1,
    last_health_check="then",
    last_error="why",
)
MODEL = ModelView(
    model_id="org/a",
    revision=None,
    commit="c0ffee",
    source="hub",
    status="verified",
    downloaded=True,
    cache_path="/cache",
    cache_size_bytes=7,
    files=(FileView("config.json", 7, None),),
    progress=JobProgress(step="loading"),
    metadata={"task": "dense", "architectures": ["A"]},
    last_verified="then",
    verification_error=None,
    verification=VerificationView(384, 1.5, 100, None),
    download_error=None,
    added_at="before",
)


def test_an_instance_is_told_as_it_was_asked_for_and_then_as_it_is() -> None:
    assert json.dumps(VIEW.mapping()) == (
        '{"name": "a", "model_id": "org/model", "revision": null, "port": 8080, "gpu_id": null, "gpu_ids": [], '
        '"replicas": 2, "max_batch_tokens": 16384, "max_concurrent_requests": 512, "pooling": "cls", "dtype": null, '
        '"prometheus_port": 8700, "startup_timeout_secs": 300, "engine": "embedded", "extra_args": [], '
        '"token_ids": "accept", "download": "auto", "aliases": [], "default": false, '
        '"request_logs": false, "express": false, "cache": true, "start": "eager", "idle_unload_secs": 0, '
        '"undo_secs": 600, "max_replicas": null, "node_labels": [], '
        '"status": "running", "pid": 77, '
        '"created_at": "now", "uptime_secs": 2, '
        '"generation": 1, "restarts": 4, "health_check_failures": 1, "last_health_check": "then", "last_error": "why", '
        '"progress": null, "load_secs": null, "rolling": [], "replacement": null, "undo": null, '
        '"replicas_ready": 1, '
        '"replica_list": [{"index": 0, "address": "127.0.0.1:8080", "port": 8080, "prometheus_port": 8700, '
        '"gpu_id": null, "pid": null, "status": "starting", "exit_status": 3, "uptime_secs": null}, '
        '{"index": 1, "address": "127.0.0.1:8081", "port": 8081, '
        '"prometheus_port": 8701, "gpu_id": 5, "pid": 77, "status": "running", "exit_status": null, '
        '"uptime_secs": 2}]}'
    )


def test_an_instance_that_is_gone_has_no_process() -> None:
    gone = VIEW.gone()
    assert (gone.status, gone.replicas_ready, gone.first_process.pid, gone.first_process.uptime_secs) == (
        "stopped",
        0,
        None,
        None,
    )
    assert [replica.exit_status for replica in gone.replicas] == [3, None]
    assert list(gone.mapping()) == list(VIEW.mapping())
    assert VIEW.status == "running"


def test_a_model_is_told_in_full() -> None:
    assert json.dumps(MODEL.mapping()) == (
        '{"model_id": "org/a", "revision": null, "commit": "c0ffee", "source": "hub", "status": "verified", '
        '"downloaded": true, "cache_path": "/cache", "cache_size_bytes": 7, "files": [{"name": "config.json", '
        '"size": 7, "sha256": null}], "progress": {"bytes_done": 0, "bytes_total": null, "bytes_per_sec": null, '
        '"eta_secs": null, "step": "loading"}, "metadata": {"task": "dense", "architectures": ["A"]}, '
        '"last_verified": "then", "verification_error": null, "verification": {"dimensions": 384, "load_secs": 1.5, '
        '"memory_bytes": 100, "gpu_memory_bytes": null}, "download_error": null, "added_at": "before"}'
    )
    bare = replace(MODEL, progress=None, metadata=None, verification=None).mapping()
    assert [bare[key] for key in ("progress", "metadata", "verification")] == [None] * 3
    assert (MODEL.gone().status, MODEL.gone().downloaded, MODEL.downloaded) == ("available", False, True)


def test_gpus_are_told_in_full() -> None:
    device = Device(1, "GPU-1", "H200", 10, 4, 6, 0.5, 40)
    assert json.dumps(GpuView(device, (GpuReplicaView("a", 0, None),)).mapping()) == (
        '{"index": 1, "uuid": "GPU-1", "name": "H200", "memory_total": 10, "memory_used": 4, "memory_free": 6, '
        '"utilization": 0.5, "temperature": 40, "error": null, "replicas": [{"instance": "a", "replica": 0, '
        '"memory_used": null}]}'
    )
