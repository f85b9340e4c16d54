"""A program that makes a prediction, a push and a gather, and prints which modules of these packages each passes."""

import json
import sys
import threading
from pathlib import Path

import shoal

SRC = f"{Path(shoal.__file__).parent}/"
sys.path.append(str(Path(__file__).parents[2]))  # for helpers of other tests
passed = {}
request = None


def note(frame, event, arg):
    name = frame.f_code.co_filename
    if request is not None and event == "call" and name.startswith(SRC):
        package, _, module = name[len(SRC) :].partition("/")
        if package in ("serving", "gather"):
            passed[request].add(module)


def traced(name, work):
    """Runs ``work`` twice and records the second time; the first run also creates what later runs reuse."""
    global request
    work()
    passed[name] = set()
    request = name
    work()
    request = None


def serving(folder):
    import grpc
    import torch

    from shoal.serving import (
        Feature,
        ModelExporter,
        ModelServer,
        ModelServerConfig,
        PredictRequest,
        gen_model_config,
        tensor_to_proto,
    )
    from shoal.serving.sync.publisher import Publisher
    from shoal.table import test_hash_table
    from tests.serving.sources import HandSource

    class Net(torch.nn.Module):
        def forward(self, user):
            return {"score": user.sum(1)}

    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(10), torch.ones(10, 4))
    exporter = ModelExporter(folder, model_name="m", net=Net(), features={"user": Feature(slot="user")})
    exporter.export([{"user": table}], global_step=1)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", f"{folder}/exported_models"))
    server = ModelServer(config=config, poll_wait_seconds=0).start()
    replica = test_hash_table(4, name_suffix="fresh")
    server.serve_tables("rows", {"user": replica})
    message = PredictRequest()
    message.model_spec.name, message.model_spec.signature_name = "m", "serving_default"
    message.inputs["user"].CopyFrom(tensor_to_proto(torch.tensor([[1, 2]])))
    data = message.SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        predict = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        for _ in range(4):  # until the server knows that requests are short
            predict(data, timeout=60)
        traced("predict", lambda: predict(data, timeout=60))
    source = HandSource({replica.name: 4})
    publisher = Publisher(source, [server.address], model="rows")

    def push():
        source.learn(replica.name, [1], source.step)
        publisher.flush(60)

    traced("push", push)
    publisher.close()
    server.stop(0)


def gathering():
    import torch

    from shoal.gather import GatherConfig, GatherPlan, GradientSpec, MemoryStore, compress, dump_payload, gather

    model = torch.nn.Linear(64, 64, bias=False)
    spec = GradientSpec.from_model(model)
    store = MemoryStore()
    for uid in range(2):
        payload = compress({"weight": torch.randn(64, 64)}, spec, window=1)
        store.put(1, uid, dump_payload(payload))
    plan = GatherPlan(1, range(2), time_max=1_000_000, timeout_s=60)
    config = GatherConfig(late_grace_s=0, not_found_limit=1)
    traced("gather", lambda: gather(plan, spec, store, config=config))


if __name__ == "__main__":
    threading.setprofile(note)  # before any thread is started
    sys.setprofile(note)
    serving(sys.argv[1])
    gathering()
    sys.setprofile(None)
    print(json.dumps({name: sorted(modules) for name, modules in passed.items()}))
