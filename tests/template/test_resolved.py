"""The ground that the rules stand on: values are the ones that CloudFormation would work with."""

from tests.template.resolved import (
    dead_letter_queues,
    drop,
    environment,
    functions,
    parameter_extremes,
    put,
    queue_sources,
    shipped,
    source,
)


def test_sam_01_values_resolve_through_mappings_parameters_and_globals() -> None:
    """A value is found wherever it is set: in a mapping, a parameter's default, an override, or Globals."""
    assert functions(shipped())["WorkerFunction"]["Timeout"] == 300
    assert functions(shipped(put("Mappings.Timeouts.Seconds.Worker", 299)))["WorkerFunction"]["Timeout"] == 299
    by_parameter = (
        put("Parameters.Seconds", {"Type": "Number", "Default": 77}),
        put("Resources.WorkerFunction.Properties.Timeout", {"Ref": "Seconds"}),
    )
    assert functions(shipped(*by_parameter))["WorkerFunction"]["Timeout"] == 77
    assert functions(shipped(*by_parameter, Seconds=78))["WorkerFunction"]["Timeout"] == 78
    by_globals = (put("Globals.Function.Timeout", 79), drop("Resources.WorkerFunction.Properties.Timeout"))
    assert functions(shipped(*by_globals))["WorkerFunction"]["Timeout"] == 79


def test_a_condition_takes_its_resources_and_branches_along() -> None:
    """The e-mail subscription exists with an address only, and an Fn::If is replaced by its branch."""
    assert "AlarmTopicEmail" not in shipped()["Resources"]
    assert "AlarmTopicEmail" in shipped(AlarmEmail="ops@example.org")["Resources"]
    memory = {"Fn::If": ["HasAlarmEmail", 256, {"Ref": "AWS::NoValue"}]}
    edit = put("Resources.WorkerFunction.Properties.MemorySize", memory)
    assert "MemorySize" not in functions(shipped(edit))["WorkerFunction"]
    assert functions(shipped(edit, AlarmEmail="ops@example.org"))["WorkerFunction"]["MemorySize"] == 256


def test_the_rules_see_the_functions_queues_and_variables() -> None:
    """No rule passes because there was nothing to look at."""
    template = shipped()
    assert {"IngestFunction", "StatusFunction", "WorkerFunction", "NotifierFunction", "RepairFunction"} <= functions(
        template
    ).keys()
    assert ("StandardQueue", "WorkerFunction") in {(s.queue, s.function) for s in queue_sources(template)}
    assert dead_letter_queues(template) == {"DeadLetterQueue", "NotificationsDeadLetterQueue"}
    assert environment(template, "WorkerFunction")["JOBS_TABLE"] == "JobsTable"
    assert {"RetentionDays": "365"} in parameter_extremes(source())
    assert {"BulkConcurrency": 2} in parameter_extremes(source())
