"""Alert rules and dashboard: checked and tested with promtool, and described in the runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.observe.monitoring import alert_rules, dashboard, prometheus_config

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
RULES = {
    rule["alert"]: rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]
}  # fmt: skip
I = 'instance="h:1"'  # noqa: E741

# Alert -> (series, with one value per minute, that make it fire by minute `at`; the minute; series that do not)
CASES = {
    "ShoalProcessDown": ([('up{job="shoal",instance="h:1"}', "0x10")], 2, [('up{job="shoal",instance="h:1"}', "1x10")]),
    "ShoalProcessFailed": ([('shoal_up_process_failed{process="p"}', "1x3")], 1, [("shoal_up_process_failed", "0x3")]),
    "ShoalProcessRestarts": (
        [('shoal_up_restarts_total{process="p"}', "0 1 2 3 4 4")], 5, [("shoal_up_restarts_total", "0 1 1 1 1 1")],
    ),
    "ShoalReplicaNotReady": ([(f"shoal_serving_ready{{{I}}}", "0x5")], 2, [(f"shoal_serving_ready{{{I}}}", "1x5")]),
    "ShoalReplicaErrors": (
        [(f"shoal_serving_failed_total{{{I}}}", "0+6x20"), (f"shoal_serving_requests_total{{{I}}}", "0+100x20")], 12,
        [(f"shoal_serving_failed_total{{{I}}}", "0+1x20"), (f"shoal_serving_requests_total{{{I}}}", "0+200x20")],
    ),
    "ShoalReplicaSlow": (
        [('shoal_serving_latency_seconds_bucket{model_name="m",signature_name="s",le="0.1"}', "0+10x20"),
         ('shoal_serving_latency_seconds_bucket{model_name="m",signature_name="s",le="0.25"}', "0+99x20"),
         ('shoal_serving_latency_seconds_bucket{model_name="m",signature_name="s",le="+Inf"}', "0+99x20")], 12,
        [('shoal_serving_latency_seconds_bucket{model_name="m",signature_name="t_assign",le="0.1"}', "0x20"),
         ('shoal_serving_latency_seconds_bucket{model_name="m",signature_name="t_assign",le="+Inf"}', "0+99x20")],
    ),
    "ShoalReplicaOverloaded": (
        [("shoal_serving_overload_refused_total", "0+1x9")], 4, [("shoal_serving_overload_refused_total", "7x9")],
    ),
    "ShoalCallerLimited": (
        [("shoal_serving_rate_refused_total", "0+1x12")], 10, [("shoal_serving_rate_refused_total", "7x12")],
    ),
    "ShoalUnknownCallers": (
        [("shoal_serving_unauthenticated_total", "0+60x12")], 10, [("shoal_serving_unauthenticated_total", "0+1x12")],
    ),
    "ShoalModelStale": (
        [('shoal_serving_model_age_seconds{model="m"}', "1000+60x9")], 6, [("shoal_serving_model_age_seconds", "60x9")],
    ),
    "ShoalModelNotLoaded": (
        [('shoal_serving_failed_versions{model="m"}', "1x5")], 2, [("shoal_serving_failed_versions", "0x5")],
    ),
    "ShoalReplicasDisagree": (
        [('shoal_serving_model_version{model="m",instance="a"}', "1x20"),
         ('shoal_serving_model_version{model="m",instance="b"}', "2x20")], 12,
        [('shoal_serving_model_version{model="m",instance="a"}', "2x20"),
         ('shoal_serving_model_version{model="m",instance="b"}', "2x20"),
         ('shoal_serving_model_version{model="n",instance="b"}', "5x20")],
    ),
    "ShoalSyncFails": (
        [('parameter_sync_failures_total{target="r"}', "0+1x12")], 10,
        [("parameter_sync_failures_total", "9x12"), ("parameter_sync_failed_rounds_total", "0x12")],
    ),
    "ShoalSyncSlow": (
        [('parameter_sync_freshness_seconds_bucket{target="r",le="60"}', "0+1x30"),
         ('parameter_sync_freshness_seconds_bucket{target="r",le="300"}', "0+60x30"),
         ('parameter_sync_freshness_seconds_bucket{target="r",le="+Inf"}', "0+60x30")], 20,
        [('parameter_sync_freshness_seconds_bucket{target="r",le="60"}', "0+60x30"),
         ('parameter_sync_freshness_seconds_bucket{target="r",le="+Inf"}', "0+60x30")],
    ),
    "ShoalSyncDropsIds": (
        [('touched_key_set_dropped_total{name="c"}', "_ _ 5 5 5")], 3, [("other", "1x9")],
    ),
    "ShoalServerReadOnly": ([("shoal_ps_read_only", "1x3")], 1, [("shoal_ps_read_only", "0x3")]),
    "ShoalServerDiskLow": ([("shoal_ps_disk_free_ratio", "0.05x9")], 6, [("shoal_ps_disk_free_ratio", "0.2x9")]),
    "ShoalServerDiskSlow": (
        [('shoal_ps_log_sync_seconds_bucket{le="0.25"}', "0+1x20"),
         ('shoal_ps_log_sync_seconds_bucket{le="1.0"}', "0+60x20"),
         ('shoal_ps_log_sync_seconds_bucket{le="+Inf"}', "0+60x20")], 12,
        [('shoal_ps_log_sync_seconds_bucket{le="0.25"}', "0+60x20"),
         ('shoal_ps_log_sync_seconds_bucket{le="+Inf"}', "0+60x20")],
    ),
    "ShoalServerCheckpointsFail": (
        [("shoal_ps_checkpoint_failures_total", "0 0 1 1 1")], 4, [("shoal_ps_checkpoint_failures_total", "3x5")],
    ),
    "ShoalServerCheckpointOld": (
        [("shoal_ps_checkpoint_age_seconds", "7300+60x15")], 12, [("shoal_ps_checkpoint_age_seconds", "600x15")],
    ),
    "ShoalServerQueueGrows": ([("shoal_ps_queued_bytes", "2e9x5")], 3, [("shoal_ps_queued_bytes", "1e6x5")]),
    "ShoalServerBadMessages": (
        [("shoal_ps_bad_messages_total", "0 1 1 1")], 3,
        [("shoal_ps_bad_messages_total", "1x5"), ("shoal_ps_refused_handshakes_total", "0x5")],
    ),
    "ShoalShardWithoutLeader": (
        [('shoal_ps_leads{instance="a"}', "0x5"), ('shoal_ps_leads{instance="b"}', "0x5"),
         ('shoal_ps_shard{instance="a",group="g",shard="0"}', "1x5"),
         ('shoal_ps_shard{instance="b",group="g",shard="0"}', "1x5")], 2,
        [('shoal_ps_leads{instance="a"}', "1x5"), ('shoal_ps_leads{instance="b"}', "0x5"),
         ('shoal_ps_shard{instance="a",group="g",shard="0"}', "1x5"),
         ('shoal_ps_shard{instance="b",group="g",shard="0"}', "1x5")],
    ),
    "ShoalShardWithoutFollower": (
        [(f"shoal_ps_followers_in_sync{{{I}}}", "0x9"), (f"shoal_ps_leads{{{I}}}", "1x9")], 6,
        [(f"shoal_ps_followers_in_sync{{{I}}}", "0x9"), (f"shoal_ps_leads{{{I}}}", "0x9")],
    ),
    "ShoalFollowerBehind": (
        [(f"shoal_ps_follower_lag_seconds{{{I}}}", "60x5"), (f"shoal_ps_leads{{{I}}}", "0x5")], 3,
        [(f"shoal_ps_follower_lag_seconds{{{I}}}", "60x5"), (f"shoal_ps_leads{{{I}}}", "1x5")],
    ),
    "ShoalRegistryLost": ([("shoal_ps_registry_contact", "0x5")], 2, [("shoal_ps_registry_contact", "1x5")]),
    "ShoalArchiveBehind": (
        [("shoal_ps_archive_age_seconds", "400x3")], 1,
        [("shoal_ps_archive_age_seconds", "5x9"), ("shoal_ps_archive_failures_total", "3x9")],
    ),
    "ShoalGuardTripped": (
        [('shoal_train_guard_tripped{reason="AUC"}', "1x3")], 1, [('shoal_train_guard_tripped{reason=""}', "0x3")],
    ),
    "ShoalTrainerStalled": (
        [("shoal_train_samples_total", "5x40")], 25, [("shoal_train_samples_total", "0+1x40")],
    ),
    "ShoalTrainerBehind": ([("shoal_train_lag_s", "700x15")], 12, [("shoal_train_lag_s", "30x15")]),
    "ShoalTrainerBadRows": (
        [("shoal_train_bad_rows_total", "0+5x30"), ("shoal_train_samples_total", "0+95x30")], 20,
        [("shoal_train_bad_rows_total", "0+1x30"), ("shoal_train_samples_total", "0+999x30")],
    ),
    "ShoalTrainerCheckpointsFail": (
        [("shoal_train_checkpoint_failures_total", "0 1 1 1")], 3, [("shoal_train_checkpoint_failures_total", "0x3")],
    ),
    "ShoalExportsFail": (
        [("shoal_train_export_failures_total", "0 1 1 1")], 3, [("shoal_train_export_failures_total", "0x3")],
    ),
    "ShoalJoinerBehind": (
        [("join_watermark_lag_s", "0+60x40")], 25, [("join_watermark_lag_s", "1800x40")],
    ),
    "ShoalJoinerLosesRecords": (
        [("join_lost_records_total", "0 0 4 4")], 3, [("join_lost_records_total", "0x3")],
    ),
    "ShoalJoinerBrokenEvents": (
        [("join_broken_impressions_total", "0+5x30"), ("join_broken_actions_total", "0+1x30"),
         ("join_impressions_total", "0+90x30"), ("join_actions_total", "0+9x30")], 20,
        [("join_broken_impressions_total", "0x30"), ("join_broken_actions_total", "0x30"),
         ("join_impressions_total", "0+90x30"), ("join_actions_total", "0+9x30")],
    ),
}  # fmt: skip


def promtool(*arguments, cwd):
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no prometheus here; `make packages` installs it as root")
    return subprocess.run([found, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_every_rule_is_well_formed_and_says_who_is_meant(tmp_path):
    (tmp_path / "alerts.yml").write_text(alert_rules())
    done = promtool("check", "rules", "alerts.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name.startswith("Shoal") for name in RULES)
    assert {rule["labels"]["severity"] for rule in RULES.values()} == {"page", "ticket"}
    assert all(rule["annotations"]["summary"] for rule in RULES.values())


def test_every_alert_fires_when_it_should_and_not_otherwise(tmp_path):
    assert CASES.keys() == RULES.keys()
    (tmp_path / "alerts.yml").write_text(alert_rules())
    tests = []
    for name, (fires, at, rests) in CASES.items():
        for series, fired in ((fires, True), (rests, False)):
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": each, "values": values} for each, values in series],
                    "promql_expr_test": [
                        {
                            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                            "eval_time": f"{at}m",
                            "exp_samples": [{"labels": "{}", "value": int(fired)}],
                        }
                    ],
                }
            )
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "30s", "tests": tests})
    )
    done = promtool("test", "rules", "tests.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_writes_files_that_prometheus_and_grafana_read(tmp_path, capsys):
    assert (
        main(["monitor", "--target", "127.0.0.1:8501", "[::1]:9100", "--write", str(tmp_path / "out"), "--json"]) == 0
    )
    written = json.loads(capsys.readouterr().out)["written"]
    assert [Path(each).name for each in written] == ["prometheus.yml", "shoal-alerts.yml", "shoal-dashboard.json"]
    config = yaml.safe_load((tmp_path / "out/prometheus.yml").read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:8501", "[::1]:9100"]
    assert json.loads((tmp_path / "out/shoal-dashboard.json").read_text())["uid"] == "shoal"
    done = promtool("check", "config", "prometheus.yml", cwd=tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert yaml.safe_load(prometheus_config([], ["http://h:1/targets.json"]))["scrape_configs"][0]["http_sd_configs"]
    for wrong, why in (
        ([], "--write FOLDER must be given"),
        (["--write", str(tmp_path), "--target", "nohost"], "must be host:port"),
        (["--write", str(tmp_path), "--up", str(tmp_path / "none.toml")], "cannot read the configuration"),
    ):
        assert main(["monitor", *wrong]) == 2
        assert why in capsys.readouterr().err


def test_panels_have_distinct_ids_places_and_a_query_each():
    panels = [each for each in json.loads(dashboard())["panels"] if each["type"] != "row"]
    assert len({each["id"] for each in panels}) == len(panels)
    taken = set()
    for each in panels:
        place = each["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert each["targets"]


def test_the_runbook_has_an_entry_for_every_alert_and_no_other():
    text = (ROOT / "docs/operations.md").read_text()
    entries = re.findall(r"^### (Shoal\w+)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in entries] == list(RULES)  # in the same order
    for name, entry in entries:
        for part in ("**Means**", "**Do**", "**If you do nothing**", "**Tried**"):
            assert part in entry, f"{name}: {part} is missing"


def test_every_metric_that_is_watched_is_explained():
    text = (ROOT / "docs/operations.md").read_text() + (ROOT / "docs/parameter_server.md").read_text()
    panels = [each["expr"] for panel in json.loads(dashboard())["panels"] for each in panel.get("targets", ())]
    for expression in (*(rule["expr"] for rule in RULES.values()), *panels):
        plain = re.sub(r'"[^"]*"', "", expression)
        for name in re.findall(r"\b(?:shoal|join|parameter_sync|touched|process)_\w+", plain):
            assert re.sub(r"_(bucket|sum|count|total)$", "", name) in text, name
