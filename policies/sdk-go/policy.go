package turnstile

// Policy decides on turns. One value lives as long as the plugin's instance, so it may keep what it learned in its fields.
type Policy interface {
	// Decide writes into decision what it wants; what it leaves out stays as earlier plugins or the built-in rule have it.
	Decide(turn *Turn, decision *Decision)
}

// Learner is a [Policy] that wants to know how turns ended.
type Learner interface {
	// Finished is called at the end of a turn, however it ended.
	Finished(turn *Turn)
}

// Listener is a [Policy] that wants to know what happens in the answer while it comes: of the kinds that the plugin's option
// events names.
type Listener interface {
	// OnEvent is told of an event. The facts of the turn can be read; it is too late for decisions.
	OnEvent(event *Event, turn *Turn)
}

var (
	configure func(*Options) (Policy, error)
	policy    Policy
)

// Register names the function that makes the policy from its options. Call it once, from an init function.
func Register(make func(*Options) (Policy, error)) { configure = make }

// onConfigure makes the policy. The old one stays if the options are refused.
func onConfigure(configuration []byte) bool {
	if configure == nil {
		Log(Error, "the policy registers nothing: call turnstile.Register from an init function")
		return false
	}
	options := parseOptions(configuration)
	made, err := configure(options)
	if err == nil {
		err = options.err()
	}
	if err != nil {
		Log(Error, err.Error())
		return false
	}
	policy = made
	return true
}

func onDecide() {
	if policy == nil {
		return
	}
	var decision Decision
	policy.Decide(&Turn{}, &decision)
	decision.write()
}

func onEvent(function uint32, json []byte) {
	if listener, ok := policy.(Listener); ok && function == eventFunction {
		if event, ok := parseEvent(json); ok {
			listener.OnEvent(&event, &Turn{})
		}
	}
}

func onFinished() {
	if learner, ok := policy.(Learner); ok {
		learner.Finished(&Turn{})
	}
}
