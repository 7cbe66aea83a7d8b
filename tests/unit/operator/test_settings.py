"""Settings of the operator."""

from __future__ import annotations

import importlib.metadata

import pytest

from inflight_operator.settings import Settings, SettingsError, settings_from


def test_nothing_needs_to_be_set() -> None:
    settings = settings_from({"PATH": "/bin", "INFLIGHT_STORAGE_CLASS": "", "INFLIGHT_UNKNOWN": "x"})
    assert settings == Settings()
    assert settings.coordinator_address("letters", "team-a", 7000) == "http://letters-coordinator.team-a.svc:7000"


def test_variables_are_read() -> None:
    settings = settings_from(
        {
            "INFLIGHT_NAMESPACE": "team-a",
            "INFLIGHT_RUN_AS": "none",
            "INFLIGHT_INFERENCE_STARTUP_S": "60",
            "INFLIGHT_IMAGE_PULL_SECRETS": "hub, mirror",
            "INFLIGHT_SCRAPE_FROM": '{"podSelector": {"matchLabels": {"app": "prometheus"}}}',
            "INFLIGHT_COORDINATOR_URL": "http://127.0.0.1:{port}/{namespace}/{service}",
        }
    )
    assert (settings.namespace, settings.run_as, settings.inference_startup_s) == ("team-a", None, 60)
    assert settings.image_pull_secrets == ("hub", "mirror")
    assert settings.scrape_from == {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    assert settings.coordinator_address("x", "n", 1) == "http://127.0.0.1:1/n/x-coordinator"


def test_default_images_are_of_this_release_and_from_the_registry_of_the_installation() -> None:
    version = importlib.metadata.version("inflight")
    assert Settings().image("actor") == f"inflight-runtime:{version}"
    settings = Settings(registry="mirror.example.test/ml/", trainer_image="own:2")
    assert settings.image("actor") == f"mirror.example.test/ml/inflight-runtime:{version}"
    assert settings.image("trainer") == "own:2"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("INFLIGHT_SCRAPE_FROM", "{", "INFLIGHT_SCRAPE_FROM='{' is not a JSON object"),
        ("INFLIGHT_SCRAPE_FROM", "[]", r"INFLIGHT_SCRAPE_FROM='\[\]': Input should be a valid dictionary"),
        ("INFLIGHT_RUN_AS", "root", "INFLIGHT_RUN_AS='root': Input should be a valid integer"),
        ("INFLIGHT_ACTOR_STARTUP_S", "0", "INFLIGHT_ACTOR_STARTUP_S='0': Input should be greater"),
        ("INFLIGHT_MODEL_ACCESS_MODE", "x", "INFLIGHT_MODEL_ACCESS_MODE='x': Input should be 'ReadWriteOnce'"),
        ("INFLIGHT_COORDINATOR_URL", "http://{host}", r"only \{service\}, \{namespace\} and \{port\} are filled in"),
    ],
)
def test_a_value_that_cannot_be_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings_from({variable: value})
