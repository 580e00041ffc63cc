"""Roll-outs: a work that is done to one machine after the other, while their cluster goes on.

``work`` (what is rolled out), ``playbook`` (a work that is an Ansible playbook), ``works`` (the known works by name);
then in the order of a command: ``context`` (what it works with), ``commands`` and ``engine`` (the whole roll-out),
``unfinished`` (what another command left), ``running`` (machines in parallel), ``locking`` and ``stages`` (one
machine); ``abandon`` and ``status``. The decisions are pure: the package ``gpunodes.rollout``.
"""
