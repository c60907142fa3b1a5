"""The registry: the truth about every job, in Redis. A Celery message is only a hint to look here.

Keys of one hash slot, `millrace:{s0}:` (see `keys`):

    j:<job>:job     HASH  v, st, n, ok, err, exp, bytes, tenant, pri, spec, created, started, deadline, cancel, fin,
                          reason, ns, sd (shards, shards done), tokp, tokc, toko (prompt, cached, output tokens),
                          retain, idem, plan_tok (the token under which it was planned), lost_plan
    j:<job>:in      HASH  index -> request line as it was given
    j:<job>:res     HASH  index -> record, JSON; written once (HSETNX)
    j:<job>:ord     LIST  indices in the order their records were written
    j:<job>:s:plan  HASH  the job's plan, until it is planned     \\ a unit: st, idx, n, done, own, tok, lease, fence,
    j:<job>:s:<k>   HASH  shard k, until its prompts have records /  att, rp (re-published), since
    open            ZSET  <job>/<unit> -> next look, ms: lease end, or announced + grace
    adm, adm:t:<tenant>   HASH  prompts, bytes, jobs outstanding; adm also has total (records) and rate, and since ever
                          sub_jobs, sub_prompts (accepted), end_<state> (jobs), frames (that were no message)
    idem:<digest>   STRING job id
    jobs            ZSET  job -> created, ms, the newest 10 000
    dead            ZSET  <job>/<unit> that crashed too many workers ; deadraw LIST of frames that were no message
    w:<worker>      HASH  heartbeat

A unit of work is a job's plan or one of its shards; both are claimed, renewed, released and written through a lease
with a fencing token `<n>:<uuid>`. All times are Redis' own (TIME), in ms. A job is finished by the script that writes
its last record, and by nothing else: every accepted prompt ends in exactly one.
"""
