"""The tests that `make test-stack` runs; `make test-all` runs all tests.

An entry is a test, or one case of it. `CORE` are tests of the Slurm stack: each mode once, each kind of verdict once, and one
fault for each component. `SLOW` are tests that need no Slurm, and start several Ray clusters each: `make test` leaves them out.
"""

from collections.abc import Sequence

CORE = {
    "connections/test_contract.py": (
        "test_exit_code_and_output_of_a_command",
        "test_a_timeout_kills_the_command_and_its_children",
        "test_several_streams_at_once",
        "test_a_write_is_atomic_and_leaves_no_temporary_file",
        "test_large_input_and_output",
        "test_many_threads_at_once",
        "test_reading",
        "test_arguments_are_passed_unchanged",
    ),
    "connections/test_logins.py": (
        "test_a_changed_host_key_is_refused",
        "test_a_key",
        "test_a_key_and_a_keyboard_interactive_second_factor",
        "test_a_master_opened_by_hand",
        "test_a_new_host_key_is_learned_once",
        "test_a_password",
        "test_a_user_certificate",
        "test_login_shells_that_print",
        "test_one_login_serves_everything",
        "test_the_agent",
        "test_two_jump_hosts_each_with_a_login_of_its_own",
    ),
    "connections/test_bad_input.py": ("test_a_wrong_host", "test_a_wrong_key", "test_a_wrong_port", "test_a_wrong_user"),
    "connections/test_check.py": ("test_the_stack_is_found",),
    "connections/test_trouble.py": (
        "test_a_lost_agent_costs_no_login",
        "test_a_restart_between_operations",
        "test_an_upload_resumes_after_a_restart",
        "test_max_sessions[paramiko-1]",
        "test_max_sessions[openssh-1]",
    ),
    "slurm/test_partition_arrays_on_slurm.py": (
        "test_dagster_is_killed_and_a_retry_finds_the_array",
        "test_twelve_partitions_of_which_two_fail",
    ),
    "slurm/test_submitted_on_slurm.py": (
        "test_a_cancelled_task_ends_its_job_and_no_other",
        "test_five_processes_with_one_key_submit_one_job",
    ),
    "example/test_example.py": ("test_the_assets_on_slurm",),
    "faults/test_cancellation.py": (
        "test_a_run_is_interrupted[slurm-pending]",
        "test_a_run_is_interrupted[slurm-running]",
        "test_a_run_is_interrupted[slurm-session-running]",
    ),
    "faults/test_dagster_dies.py": (
        "test_a_process_that_was_taken_for_dead_leaves_its_job_to_the_retry",
        "test_a_service_that_is_stopped_leaves_its_job_to_the_retry[slurm-running]",
        "test_dagster_is_killed[slurm-running]",
        "test_dagster_is_killed[slurm-session-running]",
        "test_dagster_is_killed[slurm-unrecorded]",
    ),
    "faults/test_doctor.py": (
        "test_a_defect_is_named_by_its_line[a changed host key]",
        "test_a_defect_is_named_by_its_line[a full disk]",
        "test_a_defect_is_named_by_its_line[a partition that is down]",
        "test_a_defect_is_named_by_its_line[no account]",
        "test_a_defect_is_named_by_its_line[start-up files that print]",
        "test_a_defect_is_named_by_its_line[the nodes cannot reach each other]",
        "test_a_healthy_site_gives_no_alarm[two nodes with GPUs]",
    ),
    "faults/test_full_disk.py": ("test_the_shared_file_system_is_full[slurm]",),
    "faults/test_jobs.py": (
        "test_a_health_check_fails_on_one_node",
        "test_a_node_dies",
        "test_a_queue_timeout",
        "test_a_submission_that_is_cut_off_makes_one_job",
        "test_an_admin_cancels_a_pending_job",
        "test_an_admin_cancels_a_running_job",
        "test_odd_characters_everywhere",
        "test_out_of_memory",
        "test_slurmctld_restarts",
        "test_sshd_restarts",
        "test_symmetric_run",
        "test_the_time_limit",
    ),
    "faults/test_lagging_files.py": ("test_runs_on_a_lagging_file_system[slurm]",),
    "faults/test_link.py": (
        "test_a_link_that_stays_away_for_too_long[slurm]",
        "test_lines_and_messages_over_several_disconnects[slurm-paramiko]",
        "test_lines_and_messages_over_several_disconnects[slurm-session-openssh]",
    ),
    "faults/test_nodes.py": (
        "test_a_job_is_preempted[slurm]",
        "test_a_process_of_a_worker_is_killed",
        "test_a_process_of_the_head_is_killed[slurm-gcs_server-cluster-lost]",
        "test_a_process_of_the_head_is_killed[slurm-session-runtime-runtime]",
    ),
    "faults/test_other_user.py": ("test_a_stranger_gets_hold_of_nothing[slurm]",),
    "faults/test_secrets.py": ("test_secrets_are_nowhere_else[slurm]",),
    "faults/test_sessions.py": (
        "test_a_creator_is_killed_before_it_submitted",
        "test_a_payload_exceeds_the_memory",
        "test_a_worker_node_dies",
        "test_somebody_cancels_the_session",
        "test_twenty_at_once_submit_one_job",
    ),
    "faults/test_unhealthy_nodes.py": ("test_a_full_disk", "test_a_session[warm]"),
    "faults/test_slurm_is_down.py": (
        "test_accounting_is_away[slurm]",
        "test_slurmctld_is_away_while_a_job_waits_runs_and_ends[slurm]",
    ),
    "slurm/test_settings_on_slurm.py": ("test_an_asset_has_its_own_nodes_and_never_waits_for_what_they_lack",),
    "slurm/test_addresses.py": ("test_a_head_that_is_named_by_its_host",),
    "slurm/test_bad_input.py": (
        "test_a_base_that_cannot_be_written",
        "test_a_launcher_that_wants_more_than_the_queue_grants",
        "test_an_environment_that_is_not_there",
        "test_an_environment_without_ray",
        "test_what_the_cluster_does_not_have",
    ),
    "slurm/test_dashboard.py": ("test_the_dashboard_and_jobs_of_a_running_step[tcp]",),
    "slurm/test_terminal_on_slurm.py": ("test_a_run_is_left_found_again_entered_and_followed",),
    "slurm/test_environments.py": (
        "test_a_lock_file_is_enough",
        "test_nodes_have_copies",
        "test_modules_that_a_site_has[modules]",
    ),
    "slurm/test_hetjob.py": (
        "test_a_component_that_waits_is_named",
        "test_an_admin_cancels_a_component[other-ray]",
        "test_one_cluster_spans_the_components",
    ),
    "slurm/test_hetjob_separate.py": ("test_a_payload_and_a_cluster_each", "test_the_first_failure_ends_all[gpu]"),
    "slurm/test_partition_auto.py": ("test_a_job_runs_where_it_fits_and_nodes_are_free",),
    "slurm/test_pixi_on_slurm.py": ("test_ray_in_an_environment_of_pixi",),
    "slurm/test_queue_on_slurm.py": (
        "test_a_job_from_the_queue_to_its_end",
        "test_a_requeued_job_is_not_over",
        "test_many_callers_and_processes_are_one_to_slurmctld",
    ),
    "slurm/test_run.py": (
        "test_a_base_directory_that_was_removed_by_hand",
        "test_a_cluster_as_its_launcher_says",
        "test_a_failed_payload_is_a_failed_job",
        "test_a_payload_runs_in_a_job",
        "test_a_ray_cluster_spans_all_nodes",
        "test_a_signal_comes_ahead_of_the_time_limit",
        "test_files_travel",
        "test_gpus_are_those_that_slurm_granted",
        "test_sacct_tells_the_same",
        "test_sacct_tells_the_same_of_ray_on_two_nodes",
        "test_the_ssh_program_does_as_well",
    ),
    "slurm/test_samples_on_slurm.py": ("test_the_samples_run_in_a_session[1]",),
    "slurm/test_script_on_slurm.py": ("test_any_text_arrives_as_it_is", "test_every_field_arrives"),
    "slurm/test_session.py": (
        "test_a_cluster_of_each_payloads_own",
        "test_a_failed_payload_leaves_the_session",
        "test_a_session_that_is_gone_is_followed_by_another",
        "test_a_task_that_grows_too_large_is_killed_before_the_session",
        "test_a_warm_cluster_for_all",
        "test_an_idle_session_makes_way_for_a_job_of_the_same_user",
        "test_an_interrupt_ends_its_payload_alone",
        "test_daemons_of_ray_tasks_end_with_their_payload_on_every_node",
        "test_figures_in_a_warm_cluster_are_each_payloads_own",
        "test_two_assets_of_one_run_share_a_job",
        "test_what_does_not_fit",
    ),
    "slurm/test_session_cli.py": ("test_a_session_from_pending_to_its_end",),
    "slurm/test_session_commands.py": ("test_a_warm_step_runs_no_command",),
    "slurm/test_session_hetjob.py": ("test_a_warm_cluster_across_components",),
    "slurm/test_session_scope.py": ("test_the_session_lives_as_long_as_the_run[in_process]",),
    "slurm/test_starting.py": ("test_a_cluster_is_ended_by_its_name", "test_a_runtime_that_does_not_come"),
    "slurm/test_submission.py": (
        "test_an_sbatch_that_leaves_it_open_whether_there_is_a_job",
        "test_a_job_that_comes_late_is_cancelled",
    ),
    "slurm/test_transport_on_slurm.py": (
        "test_a_tree_arrives_and_the_nodes_see_it",
        "test_what_is_there_costs_one_small_call",
    ),
    "slurm/test_without_ssh.py": ("test_dagster_runs_in_a_job_itself",),
    "stack/test_stack.py": ("test_batch_job", "test_gpus", "test_nodes_partitions_and_version", "test_two_users"),
}

SLOW = {
    "example/test_example.py": ("test_the_demo_materializes_the_first_assets",),
    "faults_without_slurm/test_partitions.py": ("test_dagster_and_the_head_node_are_killed",),
    "faults_without_slurm/test_service_stop.py": (
        "test_otherwise_the_payload_ends",
        "test_the_next_attempt_goes_on_with_the_job[slurm-True]",
    ),
    "local/test_interrupt.py": ("test_cancelling_one_payload_keeps_the_warm_cluster",),
    "local/test_preload.py": ("test_payloads_of_a_warm_cluster_begin_with_their_modules_imported",),
    "local/test_ray.py": (
        "test_a_warm_cluster_is_shared_between_processes_and_ends_itself_when_idle",
        "test_a_payload_fails_that_would_wait_forever",
    ),
    "local/test_scope.py": (
        "test_the_cluster_lives_as_long_as_the_run[multiprocess]",
        "test_the_cluster_of_a_killed_run_ends_by_its_idle_timeout",
    ),
    "local/test_session_components.py": ("test_payloads_with_other_requirements",),
    "local/test_shared_cluster.py": ("test_usage_is_measured_per_payload",),
    "runtime/test_clusters.py": (
        "test_a_lost_node_drains_the_session",
        "test_daemons_of_tasks_end_with_their_payload_on_every_node",
        "test_leaks_in_a_warm_cluster_are_reported",
        "test_the_loss_of_the_head_ends_the_session",
        "test_two_clusters_at_once_on_the_same_nodes",
    ),
    "runtime/test_unschedulable.py": ("test_feasible_says_what_ray_does",),
    "unit/test_dg_components.py": ("test_a_project_of_create_dagster",),
    "runtime/test_components.py": (
        "test_clusters_of_payloads_own_have_the_components_too",
        "test_one_cluster_across_two_components_of_one_host",
    ),
}


def is_core(nodeid: str, stack: bool = True) -> bool:
    """Whether `make test-stack` runs a test, which uses the stack or not.

    Args:
        nodeid: as pytest names it, from the root of the repository.
        stack: whether the test uses the stack.
    """
    path, _, case = nodeid.removeprefix("tests/").partition("::")
    return any(case == entry or case.partition("[")[0] == entry for entry in (CORE if stack else SLOW).get(path, ()))


def unknown_entries(nodeids: Sequence[str]) -> list[str]:
    """Returns the entries of `CORE` and `SLOW` that name no test and no case among `nodeids`, which pytest has collected."""
    known = {name for nodeid in nodeids for name in (nodeid, nodeid.partition("[")[0])}
    named = [f"tests/{path}::{entry}" for path, entries in (*CORE.items(), *SLOW.items()) for entry in entries]
    return [each for each in named if each not in known]
