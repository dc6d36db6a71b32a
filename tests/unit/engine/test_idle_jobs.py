"""What an engine keeps of jobs that are over, when it serves thousands of them."""

from nightmill.states import Tier
from nightmill_worker.engine.idle_jobs import IdleJobs


def test_the_longest_idle_job_is_forgotten_first():
    jobs = IdleJobs(num_kept=2)
    for job in "abc":
        jobs.begin(job)
        jobs.begin(job)
    assert [jobs.end(job) for job in "abc"] == [[], [], []]  # one request of each is left
    assert [jobs.end(job) for job in "abc"] == [[], [], ["a"]]
    jobs.begin("b")
    jobs.begin("d")
    assert jobs.end("d") == []
    assert jobs.end("b") == ["c"]


def test_an_engine_does_not_remember_every_job_it_ever_had(make_drill, make_request):
    drill = make_drill(admission="growth", order="planned")
    loop = drill.loop
    for i in range(600):
        drill.add(make_request(i, 4, max_tokens=2, tier=list(Tier)[i % 3], job_id=f"job-{i}", eos=(3,)))
        drill.step()
    drill.drain()
    assert len(loop.lengths._distributions) <= 256
    assert len(loop.gate._index) <= 256
    assert len(loop.gate._distributions) <= 270  # slots are used again
    assert sum(len(queue._jobs) for queue in loop.queue._fresh.values()) <= 256


def test_a_job_that_comes_again_in_time_is_still_known(make_drill, make_request):
    drill = make_drill(admission="growth")
    for i in range(40):
        drill.add(make_request(i, 4, max_tokens=300, job_id="job", eos=tuple(range(0, 1000, 12))))
    drill.drain()
    learnt = drill.loop.lengths.expected("job", "normal", 300)
    assert learnt < 60
    drill.add(make_request(100, 4, max_tokens=300, job_id="other"))
    drill.drain()
    assert drill.loop.lengths.expected("job", "normal", 300) == learnt
